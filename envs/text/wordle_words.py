"""Four hundred ordinary English words of five letters, written for this project."""

from __future__ import annotations

from typing import Final

_LIST: Final = """
about above adult after again agent agree ahead alarm album alert alike alive allow along alter
among anger angle angry apart apple arena argue aside asset audio avoid award aware badly baker
bases basic beach began begin being below birth black blame blank blind block blood board boost
bound brain bread breed brief bring broke brush build cable candy cargo carry catch cause chain
chair chart chase cheap check cheek chess chief child china chose civil claim class clean clear
clerk climb clock close cloud coast color couch count cover crack cream crime cross crowd crown
curve daily dance death depth diary dirty doubt dozen drama dress drive early earth elbow empty
enemy enjoy enter equal event every exact extra faith false fault favor fence fiber field fifth
final first flame flash fleet floor flour focus forty found frame fresh front giant glass globe
glory grace grade grain grand grant grape grass green grief group guard guess guest guide habit
happy harsh heart heavy hello honey honor horse house human humor ideal image index inner issue
ivory joint judge juice knife knock label labor large later laugh layer learn lease leave legal
lemon level light local loose lover lower loyal lucky lunch magic major maker march match maybe
mayor medal metal meter model money month moral motor mount mouth movie music nerve never noise
novel nurse ocean offer often olive onion opera orbit order other owner paint panel patch pause
peace pearl phase phone photo piano piece pitch pizza plane plant plate point porch pound power
press price pride prime print prize proud queen quick quiet quite ranch range rapid ratio reach
reply rider ridge rifle right rival river robot rough round route royal rural salad sauce scale
scene scope score sense seven shake share sheep sheet shelf shell shift shine shirt shock shoot
shore short shout skill skirt slate sleep slice slide small smart smile snake solid solve sorry
sound south space spare speed spice spoon sport stage stair stand start steam stick still stone
storm story stove straw study style sugar sweet swing table teach thank theme thick think third
three throw tiger tired title toast today tooth topic total touch tough tower track trade trail
train trend trial tribe trick truck trust truth twice under union urban usual value video visit
voice waste water wheel where white whole woman world worry wound write wrong yield young youth
"""
WORDS: Final = tuple(_LIST.split())
