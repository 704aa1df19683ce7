"""T1 end to end, tiny: stops, hosts and staleness change no number they should not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from algorithms.t1.ahead import Ahead
from algorithms.t1.batches import Batch
from algorithms.t1.model import ModelShape, scratch_model
from algorithms.t1.roles import Problems
from algorithms.t1.workload import WORKLOAD, T1Recipe
from heliostat import checkpoint, launch
from heliostat.actors.data import Stream
from heliostat.folder import RunFolder
from heliostat.launch import Order, Outcome
from heliostat.layout import Hosts, Layout
from heliostat.run import Assignment, Run
from heliostat.tracker import JsonlTracker, read_metrics
from heliostat.weights import Weights

TINY = replace(
    WORKLOAD.recipe("smoke"),
    layout=Layout.in_process(),
    hidden=32,
    layers=1,
    feed_forward=32,
    sft_steps=6,
    sft_warm_steps=1,
    sft_batch=8,
    steps=6,
    prompts_per_step=4,
    prompts_per_job=2,
    answers_per_prompt=3,
    max_new_tokens=12,
    optimizer="muon",
    checkpoint_every=4,
    keep_checkpoints=9,
    eval_every=2,
    eval_prompts=8,
    test_prompts=8,
    test_answers=2,
)


def run(folder: Path, recipe: T1Recipe = TINY) -> Outcome:
    return launch.create(order(folder, recipe))


def order(folder: Path, recipe: T1Recipe = TINY) -> Order:
    return Order(workload=WORKLOAD, spec="t1", recipe=recipe, folder=RunFolder(folder))


def timeless(folder: Path) -> list[dict[str, Any]]:
    rows = [
        {key: value for key, value in row.items() if key != "time" and not key.startswith("perf/")}
        for row in read_metrics(folder)
    ]
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("straight") / "a")


def test_the_final_metrics_name_accuracy_before_and_after(straight: Outcome) -> None:
    names = {f"{prefix}accuracy{suffix}" for prefix in ("", "sft_") for suffix in ("", "_t05")}
    assert names <= set(straight.metrics)
    assert straight.metrics["prompts"] == 8
    assert straight.metrics["gain"] == pytest.approx(
        straight.metrics["accuracy"] - straight.metrics["sft_accuracy"]
    )


def test_every_update_is_logged_and_lags_by_at_most_the_staleness(straight: Outcome) -> None:
    rows = read_metrics(straight.folder)
    lags = [row["lag/versions"] for row in rows if "lag/versions" in row]
    assert lags == [0, 1, 1, 1, 1, 1]
    assert [row["step"] for row in rows if "sft/loss" in row] == list(range(1, 7))
    assert [row["step"] for row in rows if "train/kl" in row] == list(range(7, 13))
    assert sorted(row["step"] for row in rows if "eval/accuracy" in row) == [8, 10, 12]


def test_every_step_tells_how_much_it_did(straight: Outcome) -> None:
    steps = [row for row in read_metrics(straight.folder) if "perf/step_s" in row]
    assert len(steps) == 12
    for row in steps:
        answers = row["perf/samples_per_s"] * row["perf/step_s"]
        tokens = row["perf/tokens_per_s"] * row["perf/step_s"]
        assert answers == pytest.approx(round(answers))
        assert answers <= round(tokens) == pytest.approx(tokens)
    updates = [row["perf/queue_depth"] for row in steps if "train/kl" in row]
    assert updates == [0, 1, 1, 1, 1, 1]  # in this process a batch is ready once it is asked for


@pytest.mark.parametrize("stop_at", [3, 4, 6, 7, 9, 10])
def test_a_stop_anywhere_resumes_to_the_same_numbers(
    tmp_path: Path, straight: Outcome, stop_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = order(tmp_path / "a")
    report = Run.report

    def stopping(self: Run[Any], step: int, metrics: Any, state: Any) -> None:
        if step == stop_at:
            wanted.folder.stop.touch()
        report(self, step, metrics, state)

    monkeypatch.setattr(Run, "report", stopping)
    assert launch.create(wanted).stopped
    monkeypatch.undo()
    found = checkpoint.latest(wanted.folder.checkpoints)
    assert found is not None
    assert found[0] == stop_at
    resumed = launch.resume(wanted)
    assert resumed.metrics == straight.metrics
    assert timeless(resumed.folder) == timeless(straight.folder)


def test_a_branch_goes_on_where_it_left_the_trunk(tmp_path: Path, straight: Outcome) -> None:
    wanted = replace(order(tmp_path / "branch"), begin_from=(RunFolder(straight.folder), 4))
    branch = launch.create(wanted)
    assert branch.metrics == straight.metrics
    assert [row["step"] for row in read_metrics(branch.folder) if "sft/loss" in row] == [5, 6]


def test_without_staleness_answers_come_from_the_newest_weights(tmp_path: Path) -> None:
    outcome = run(tmp_path / "a", replace(TINY, max_staleness=0))
    lags = [row["lag/versions"] for row in read_metrics(outcome.folder) if "lag/versions" in row]
    drifts = [row["train/drift"] for row in read_metrics(outcome.folder) if "lag/versions" in row]
    assert lags == [0] * 6
    assert max(drifts) < 1e-4


def test_a_rate_of_nothing_keeps_sampler_and_learner_in_agreement(tmp_path: Path) -> None:
    recipe = replace(TINY, lr=1e-30, muon_lr=1e-30, max_staleness=2, steps=20)
    rows = read_metrics(run(tmp_path / "a", recipe).folder)
    assert max(row["train/drift"] for row in rows if "train/drift" in row) < 1e-4
    assert max(row["lag/versions"] for row in rows if "lag/versions" in row) == 2


def test_members_change_no_number(tmp_path: Path, straight: Outcome) -> None:
    layout = Layout(
        data=Hosts(members=3), environment=Hosts(members=2), evaluation=Hosts(members=4)
    )
    outcome = run(tmp_path / "a", replace(TINY, layout=layout))
    assert outcome.metrics == straight.metrics


def test_samples_are_logged_with_right_and_wrong(straight: Outcome) -> None:
    lines = (straight.folder / "tables" / "samples.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert {row["step"] for row in rows} == {8, 10, 12}
    assert all(row["prompt"].startswith("Q ") for row in rows)


def test_the_users_own_questions_and_checkpoint_train(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = [chr(code) for code in range(32, 127)] + ["\n", "</s>", "?"]
    words = {letter: place for place, letter in enumerate(dict.fromkeys(letters))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="?")
    shape = ModelShape(hidden=32, layers=1, heads=1, feed_forward=32)
    folder = tmp_path / "model"
    fast.save_pretrained(folder)
    scratch_model(shape, len(words), words["</s>"], 0).save_pretrained(folder)
    path = tmp_path / "sums.jsonl"
    sums = [{"question": f"{a}+{a}", "answer": str(2 * a)} for a in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in sums))
    recipe = TINY.override(f"questions={path}", f"model={folder}")
    recipe.check()
    outcome = run(tmp_path / "a", recipe)
    assert outcome.metrics["prompts"] <= 8
    scratch = run(tmp_path / "b", TINY.override(f"questions={path}"))
    assert set(scratch.metrics) == set(outcome.metrics)


def test_saved_batches_are_dealt_out_over_more_ranks(tmp_path: Path, straight: Outcome) -> None:
    state = checkpoint.load(straight.folder / "checkpoints" / "step-0000000008")[1]["ahead"]
    (saved,) = state["batches"]
    prompts = sum(part["fields"]["reward"].shape[1] for part in saved)
    dealt = 0
    for rank in range(4):
        assignment = Assignment(WORKLOAD, TINY, RunFolder(tmp_path), 1, {})
        one = Run[T1Recipe](assignment, JsonlTracker(tmp_path), rank, world=4)
        ahead = Ahead(one, Stream(one.pool(Problems), Problems, 0))
        ahead.load(state)
        parts = ahead.next(Weights.of({}, 0), update=-2)
        dealt += Batch.of(parts).rewards.numel() // TINY.answers_per_prompt
    assert dealt == prompts == TINY.prompts_per_step
