"""T1's learners: adapters reach the actors, checkpoints keep every bit, layouts change nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import t1_ranks
import torch
from test_t1_train import TINY, order, timeless
from transformers import AutoModelForCausalLM

from algorithms.t1.export import export
from algorithms.t1.lora import merged, merging, with_adapters
from algorithms.t1.model import TokenScorer, local_model, optimizers
from algorithms.t1.objective import supervised_loss
from algorithms.t1.tasks import Countdown, make_policy
from algorithms.t1.updates import move_anchor
from algorithms.t1.workload import WORKLOAD, T1Recipe
from cluster.cli import main
from heliostat import checkpoint, launch
from heliostat.errors import UsageError
from heliostat.folder import RunFolder
from heliostat.layout import Layout
from heliostat.learner import Learner
from heliostat.run import Assignment, Run
from heliostat.tracker import JsonlTracker, read_metrics

TASK = Countdown(max_failures=3)
ADAPTED = replace(TINY, optimizer="adamw", lora_rank=4, lora_alpha=8.0, lr=1e-2, sft_lr=1e-2)


def a_run(folder: Path, recipe: T1Recipe) -> Run[T1Recipe]:
    return Run(Assignment(WORKLOAD, recipe, RunFolder(folder), 1, {}), JsonlTracker(folder))


def a_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens, answer = TASK.traces(TASK.rows("train")[:4], 0)
    return torch.from_numpy(tokens).clamp(min=0), torch.from_numpy(answer)


def step(policy: Learner[TokenScorer]) -> float:
    tokens, answer = a_batch()
    with policy.autocast():
        scores = policy.forward(tokens, answer)
    policy.backward(supervised_loss(scores.log_probs, float(answer.sum())))
    return policy.step()


def adapted(folder: Path) -> tuple[Learner[TokenScorer], TokenScorer]:
    """Returns a learner with adapters, and its anchor."""
    pytest.importorskip("peft", reason="pip install 'heliostat[lora]'")
    run = a_run(folder, ADAPTED)
    model = TokenScorer(with_adapters(make_policy(ADAPTED, TASK), ADAPTED))
    anchor = run.frozen(model)
    make = optimizers("adamw", 1e-2, 0.0, 0.1)
    return run.learner(model, make, merging(ADAPTED)), anchor


# ---------------------------------------------------------------------------- adapters


def test_fresh_adapters_change_nothing_and_alone_are_trained(tmp_path: Path) -> None:
    policy, _ = adapted(tmp_path)
    plain = TokenScorer(make_policy(ADAPTED, TASK))
    with torch.no_grad():
        torch.testing.assert_close(policy.model(*a_batch()), plain(*a_batch()))
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    step(policy)
    step(policy)  # B begins at 0, so that A moves from the second step on
    after = policy.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert len(changed) == 2 * 7  # A and B of each matrix of the one block


def test_a_step_on_adapters_reaches_the_samplers(tmp_path: Path) -> None:
    policy, _ = adapted(tmp_path)
    actor = TokenScorer(make_policy(ADAPTED, TASK))
    sent = [dict(policy.weights(0).arrays())]
    for version in range(1, 3):
        assert step(policy) > 0
        weights = policy.weights(version)
        sent.append(dict(weights.arrays()))
        matrices = [name for name in sent[0] if "_proj" in name]
        assert matrices
        assert all((sent[-1][name] != sent[-2][name]).any() for name in matrices)
        weights.load_into(actor)
        with torch.no_grad():
            here = policy.model(*a_batch())
            there = actor(*a_batch())
        torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)


def test_merging_gives_the_bits_that_peft_gives(tmp_path: Path) -> None:
    policy, _ = adapted(tmp_path)
    step(policy)
    ours = merged(policy.model.state_dict(), ADAPTED)
    for module in policy.model.modules():
        if hasattr(module, "merge"):
            module.merge()
    theirs = policy.model.state_dict()
    for name, value in ours.items():
        again = theirs.get(name)
        if again is None:
            again = theirs[name.replace("_proj.", "_proj.base_layer.")]
        assert torch.equal(value, again)


def test_an_anchor_of_adapters_shares_the_base_and_follows_the_rest(tmp_path: Path) -> None:
    policy, anchor = adapted(tmp_path)
    held = dict(anchor.named_parameters())
    for name, weight in policy.model.named_parameters():
        assert (held[name] is weight) == ("lora_" not in name)
    step(policy)
    with torch.no_grad():
        apart = (anchor(*a_batch()).log_probs - policy.model(*a_batch()).log_probs).abs().max()
        assert apart > 1e-3
        move_anchor(policy, anchor, decay=0.0)
        assert torch.equal(anchor(*a_batch()).log_probs, policy.model(*a_batch()).log_probs)


def test_a_run_with_adapters_stops_and_resumes_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="pip install 'heliostat[lora]'")
    recipe = replace(ADAPTED, max_staleness=0)
    straight = launch.create(order(tmp_path / "straight", recipe))
    drifts = [row["train/drift"] for row in read_metrics(straight.folder) if "train/drift" in row]
    assert max(drifts) < 1e-4  # what the samplers drew from is what the learner scores
    wanted = order(tmp_path / "broken", recipe)
    report = Run.report

    def stopping(self: Run[Any], step: int, metrics: Any, state: Any) -> None:
        if step == 9:
            wanted.folder.stop.touch()
        report(self, step, metrics, state)

    monkeypatch.setattr(Run, "report", stopping)
    assert launch.create(wanted).stopped
    monkeypatch.undo()
    assert launch.resume(wanted).metrics == straight.metrics
    assert timeless(wanted.folder.path) == timeless(straight.folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [("optimizer=muon", "take optimizer=adamw"), ("model=nowhere", "no.*config.json|found none")],
)
def test_what_adapters_cannot_do_is_refused(change: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ADAPTED.override(change).check()


# ---------------------------------------------------------------------------- checkpoints


def same_tensors(one: Path, other: Path) -> bool:
    from safetensors.torch import load_file

    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(
        value.dtype == second[name].dtype and torch.equal(value, second[name])
        for name, value in first.items()
    )


def test_a_checkpoint_goes_in_and_out_bit_for_bit(tmp_path: Path) -> None:
    given = tmp_path / "given"
    make_policy(replace(TINY, seed=5), TASK).save_pretrained(given)
    recipe = TINY.override(f"model={given}")
    recipe.check()
    policy = TokenScorer(make_policy(recipe, TASK))
    export(recipe, {"policy": {"model": policy.state_dict()}}, tmp_path / "back")
    assert same_tensors(given, tmp_path / "back")


@pytest.mark.parametrize("recipe", [TINY, ADAPTED], ids=["whole", "adapters"])
def test_an_exported_run_computes_the_same_logits_everywhere(
    tmp_path: Path, recipe: T1Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    if recipe.lora_rank:
        pytest.importorskip("peft", reason="pip install 'heliostat[lora]'")
    outcome = launch.create(order(tmp_path / "runs" / "a", recipe))
    target = tmp_path / "model"
    command = ["export", "a", "--to", str(target), "--runs", str(tmp_path / "runs")]
    assert main(command) == 0
    assert "after step 12" in capsys.readouterr().out
    found = checkpoint.latest(RunFolder(outcome.folder).checkpoints)
    assert found is not None
    trained = TokenScorer(make_policy(recipe, TASK))
    trained.load_state_dict(merged(found[1]["policy"]["model"], recipe))
    theirs = AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    tokens, _ = a_batch()
    with torch.no_grad():
        wanted = trained.policy(input_ids=tokens).logits
        assert torch.equal(theirs(input_ids=tokens).logits, wanted)
        assert torch.equal(local_model(target)(input_ids=tokens).logits, wanted)
    after = TINY.override(f"model={target}", "sft_steps=0", "steps=1", "optimizer=adamw")
    after.check()
    again = launch.create(order(tmp_path / "runs" / "b", after))
    assert again.metrics["sft_accuracy"] == outcome.metrics["accuracy"]
    assert main(command) == 2  # the folder is no longer empty
    assert main([*command[:3], str(tmp_path / "c"), *command[4:], "--step", "3"]) == 2
    assert "found steps [4, 8, 12]" in capsys.readouterr().err


def test_a_model_of_another_vocabulary_does_not_play_countdown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7}))
    with pytest.raises(UsageError, match="vocab_size=7"):
        TINY.override(f"model={tmp_path}").check()


# ---------------------------------------------------------------------------- layouts


def gradients(layout: Layout) -> tuple[list[torch.Tensor], int]:
    """Returns a pass's gradients, and the bytes that its graph keeps between forward and back."""
    recipe = replace(TINY, layers=4)
    model = TokenScorer(make_policy(recipe, TASK), "rows")  # the path that checkpointing takes
    policy = Learner(model, optimizers("adamw", 1e-2, 0.0, 0.1), layout, torch.device("cpu"), 1)
    tokens, answer = a_batch()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = policy.forward(tokens, answer)
    policy.backward(supervised_loss(scores.log_probs, float(answer.sum())))
    held = sum(size for place, size in kept.items() if place not in weights)
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None], held


def test_activation_checkpointing_keeps_gradients_and_spares_memory() -> None:
    plain, much = gradients(Layout())
    again, little = gradients(Layout(activation_checkpointing=True))
    assert len(plain) == len(again) > 0
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert little < much / 3


def test_half_precision_trains_and_stays_close() -> None:
    losses: dict[str, list[float]] = {}
    for precision in ("float32", "bfloat16"):
        model = TokenScorer(make_policy(TINY, TASK))
        layout = Layout(precision=precision)  # type: ignore[arg-type]
        make = optimizers("adamw", 1e-2, 0.0, 0.1)
        policy = Learner(model, make, layout, torch.device("cpu"), 1)
        losses[precision] = []
        for _ in range(20):
            step(policy)
            with torch.no_grad(), policy.autocast():
                losses[precision].append(-float(policy.forward(*a_batch()).log_probs.mean()))
        assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert losses["bfloat16"][-1] < 0.6 * losses["bfloat16"][0]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["bfloat16"] != pytest.approx(losses["float32"], rel=1e-5)


LAYOUTS = ["ddp", "fsdp", *(["zero3"] if find_spec("deepspeed") else [])]
MORE_LAYOUTS = ["ddp", "fsdp-checkpointing", "zero3-checkpointing"]
MORE_LAYOUTS += ["lora-ddp", "lora-fsdp", "lora-zero3"]


def assert_layouts_agree(folder: Path, names: list[str]) -> None:
    """Compares every update's loss, gradient and KL; sampling differs where rounding tips it."""
    keys = ("sft/loss", "sft/gradient_norm", "train/kl", "train/entropy", "train/gradient_norm")
    found = {
        name: {
            (row["step"], key): row[key]
            for row in read_metrics(folder / name)
            for key in keys
            if key in row
        }
        for name in names
    }
    for name, numbers in found.items():
        like = found["lora-ddp" if name.startswith("lora-") else "ddp"]
        assert len(numbers) == 2 * t1_ranks.TINY.sft_steps + 3 * t1_ranks.TINY.steps
        assert numbers == pytest.approx(like, rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_t1_learns_the_same_however_two_ranks_share_the_model(tmp_path: Path) -> None:
    t1_ranks.start(LAYOUTS, tmp_path)
    assert_layouts_agree(tmp_path, LAYOUTS)


@pytest.mark.long
def test_t1_learns_the_same_with_checkpointing_and_sharded_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="pip install 'heliostat[lora]'")
    pytest.importorskip("deepspeed", reason="pip install 'heliostat[deepspeed]'")
    t1_ranks.start(MORE_LAYOUTS, tmp_path)
    assert_layouts_agree(tmp_path, MORE_LAYOUTS)


@pytest.mark.ray
@pytest.mark.long
def test_zero_under_ray_train_goes_on_in_one_process(ray_cluster: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="pip install 'heliostat[deepspeed]'")
    layout = replace(t1_ranks.LAYOUTS["zero3"], start_deadline_s=300)
    recipe = replace(TINY, layout=layout, optimizer="adamw", steps=2, sft_batch=8)
    whole = replace(order(tmp_path / "runs" / "a", recipe), address=ray_cluster)
    assert launch.create(whole).metrics["prompts"] == 8
    alone = replace(recipe, layout=Layout(), steps=4)
    begin_from = (whole.folder, recipe.total_steps)
    branch = replace(order(tmp_path / "runs" / "b", alone), begin_from=begin_from)
    launch.create(branch)
    steps = [row["step"] for row in read_metrics(branch.folder.path) if "train/kl" in row]
    assert steps == [9, 10]
