"""The three families of shared actors; a method plugs plain objects into them."""
