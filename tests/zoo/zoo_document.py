"""The tables of docs/exactness.md, made of those that the tests run: python tests/zoo/zoo_document.py writes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "exactness.md"
MARK = "<!-- What follows is written by tests/zoo/zoo_document.py. -->\n"

# Refused by tests of other files: what, a part of the message (… stands for what is filled in), and the test.
ELSEWHERE = [
    ("`loss()` calls `model.module`, `self.net`: not the wrapper", "loss() did not call the model that it was given",
     "train/test_train_ranks_refused.py::test_a_loss_that_goes_around_the_wrapper_is_refused"),
    ("`loss()` trains a different model from the one `model()` returned, one rank",
     "given no parameter of model() a gradient",
     "train/test_train_refusals.py::test_a_loss_of_another_model_is_refused"),
    ("`model.encode(x)` on several ranks", "on several ranks only model(...) sums the gradients",
     "train/test_train_ranks_refused.py::test_a_loss_that_goes_around_the_wrapper_is_refused"),
    ("gradients, or weights after two steps, that differ by rank", "differ between the ranks",
     "train/test_train_ranks_refused.py::test_a_loss_that_goes_around_the_wrapper_is_refused"),
    ("ranks that drift apart later: no checkpoint is published", "did not hold what rank 0 held",
     "train/test_train_ranks_refused.py::test_ranks_that_drift_apart_make_no_checkpoint"),
    ("a parameter that is not trained and that each rank changes in its own way, such as a codebook",
     "the state differs between the ranks", "train/test_train_ranks_refused.py::"
     "test_ranks_that_drift_apart_make_no_checkpoint"),
    ("a layer unfrozen in training, several ranks", "was frozen when training began and is trained now",
     "train/test_train_ranks_refused.py::test_layers_are_frozen_on_several_ranks_only_where_ddp_follows"),
    ("a layer frozen in training without `train.find_unused_parameters`, several ranks",
     "was trained when training began and is frozen now",
     "train/test_train_ranks_refused.py::test_layers_are_frozen_on_several_ranks_only_where_ddp_follows"),
    ("LBFGS, GSAM and other optimizers that need a closure", "whose step() needs a closure",
     "train/test_train_refusals.py::test_what_cannot_be_trained_is_refused_before_the_first_update"),
    ("AdaHessian, SophiaH and others that need second derivatives", "needs second derivatives, by loss.backward",
     "train/test_train_refusals.py::test_what_cannot_be_trained_is_refused_before_the_first_update"),
    ("optimizers with `differentiable=True`", "with differentiable=True, whose step() is to be differentiated itself",
     "train/test_train_refusals.py::test_what_cannot_be_trained_is_refused_before_the_first_update"),
    ("LOMO and AdaLOMO, which change weights in the backward pass", "which changes weights while its fused_backward()",
     "train/test_train_refusals.py::test_what_cannot_be_trained_is_refused_before_the_first_update"),
    ("ZeroRedundancyOptimizer, which divides its state among the ranks", "divides its state among the ranks",
     "train/test_train_refusals.py::test_what_cannot_be_trained_is_refused_before_the_first_update"),
    ("Lookahead of torch_optimizer, SafeFP16Optimizer and others that torch has not set up",
     "which this torch cannot save",
     "train/test_train_refusals.py::test_what_cannot_be_trained_is_refused_before_the_first_update"),
    ("DistributedMuon, DeMo and others that need torch.distributed, on a single rank",
     "a single rank has no process group",
     "train/test_train_refusals.py::test_what_cannot_be_trained_is_refused_before_the_first_update"),
    ("DistributedMuon and others with a state of their own on each rank", "state is not the same on every rank",
     "train/test_train_ranks_refused.py::test_an_optimizer_with_a_state_of_each_rank_is_refused"),
    ("`loss()` that calls `backward()`, or keeps what was computed in an earlier step without `detach()`",
     "has already been through a backward pass",
     "train/test_train_refusals.py::test_a_loss_whose_backward_pass_has_been_run_is_refused"),
    ("`train.clip_norm` with sparse gradients", "torch cannot limit the norm of sparse gradients",
     "train/test_train_refusals.py::test_what_cannot_be_trained_is_refused_before_the_first_update"),
    ("fp16 parameters with `train.precision: fp16`", "model() gives parameters in fp16",
     "train/test_train_refusals.py::test_what_cannot_be_trained_is_refused_before_the_first_update"),
    ("a DataLoader, such as one with a WeightedRandomSampler, from `train_data()` or `eval_data()`",
     "return its data set: the trainer makes the batches itself",
     "train/test_train_refusals.py::test_a_loader_in_the_place_of_a_data_set_is_refused"),
    ("`train.drop_last: false` that leaves BatchNorm one sample", "for the last batch of an epoch",
     "train/test_train_refusals.py::test_what_cannot_be_trained_is_refused_before_the_first_update"),
    ("`train.compile` with `train.grad_checkpointing`", "train.compile: true, which cannot trace",
     "train/test_train_refusals.py::test_compiled_blocks_are_not_computed_again"),
    ("fused SGD with momentum and dampening, with fp16 or on a GPU",
     "SGD with fused=True, momentum and dampening would be spoilt",
     "train/test_train_nonfinite.py::test_a_fused_sgd_begins_without_momentum_when_its_first_update_is_skipped"),
    ("updates that are not finite, more in a row than `train.max_bad_steps`", "updates in a row had a loss or",
     "train/test_train_nonfinite.py::test_too_many_bad_updates_name_the_step_and_the_rank"),
    ("weights or buffers that are not finite: never saved", "weights or buffers of the model are not finite",
     "train/test_train_nonfinite.py::test_what_is_no_number_is_never_saved"),
    ("the same, in a script of your own", "weights or buffers of the model are not finite",
     "train/test_train_script_ways.py::test_weights_that_are_not_finite_are_not_saved_by_a_script"),
    ("updates that a script's own GradScaler skips, more in a row than `train.max_bad_steps`",
     "the GradScaler has skipped",
     "train/test_train_own_scaler.py::test_updates_that_are_skipped_forever_end_the_run"),
    ("`evaluate()` that communicates between the ranks, if not all of them have as many batches",
     "not all of them have a batch left",
     "train/test_train_ranks_refused.py::test_ranks_communicate_in_an_evaluation_only_if_all_have_a_batch"),
    ("a run directory that the ranks do not share, tasks and scripts", "have different run directories",
     "train/test_train_meeting.py::test_ranks_that_were_given_different_folders_are_refused"),
    ("a task whose `load_state_dict` does not restore its state", "load_state_dict() of the task",
     "zoo/test_zoo_told.py::test_a_task_that_does_not_take_its_state_back_is_refused"),
    ("a tensor of the task that an optimizer of its own holds, and that `load_state_dict` replaces with another",
     "and would be another tensor after a resume",
     "zoo/test_zoo_own_tensors.py::test_a_tensor_that_its_optimizer_would_lose_is_refused"),
    ("a model with scripted or traced modules", "is a scripted module, whose attributes",
     "zoo/test_zoo_forgotten.py::test_scripted_modules_are_refused_by_name"),
    ("reported after the second step, or soon after it begins: what training changes and the data set or `collate` "
     "reads in workers", "from which samples or batches are made",
     "zoo/test_zoo_changed_data.py::test_what_collate_reads_in_workers_and_training_changes_is_told"),
    ("reported after the second step, or soon after it begins: attributes of model and task that training changes and "
     "that are in no checkpoint", "which no checkpoint contains: a resume",
     "zoo/test_zoo_told.py::test_what_no_checkpoint_holds_is_told_by_name"),
    ("reported when the second pass begins: a set that a pass has changed, such as by a cache of augmented samples",
     "returns different samples after a pass than",
     "train/test_train_data.py::test_a_set_that_is_another_after_a_pass_is_told"),
    ("reported when the second pass begins: an iterable set that a pass has changed, such as by a count of its passes",
     "returns different items after a pass than",
     "train/test_train_iterable.py::test_an_iterable_set_that_a_pass_changes_is_told"),
    ("a set, a stream or a `collate` that numbers words as they appear in workers, wherever it keeps the numbers",
     "from the first samples it reads",
     "train/test_train_data.py::test_workers_that_number_what_they_read_are_refused_wherever_they_keep_it"),
    ("the `collate` of an iterable set that makes a different batch from the same items, such as with a running mean",
     "makes a different batch from the same items",
     "train/test_train_collating_streams.py::"
     "test_a_collate_that_makes_another_batch_of_the_same_items_is_refused"),
    ("reported in the first step: a communication hook of DDP that keeps a state, such as PowerSGD's",
     "with a communication hook that keeps a state",
     "train/test_train_ranks_refused.py::test_a_communication_hook_with_a_state_is_told"),
    ("reported in the first step: a set, or its `collate`, that counts what is read from it",
     "which no checkpoint contains: a resume is exact only if no sample",
     "train/test_train_counting_sets.py::test_a_set_that_counts_what_it_reads_is_told"),
    ("reported when the second pass begins: a set that has grown or shrunk", "items after a pass, but had",
     "train/test_train_data.py::test_a_set_that_grows_is_told"),
    ("parameters that change their group, or defaults of the optimizer that change, in a later step",
     "in the optimizer's defaults, which no checkpoint contains",
     "zoo/test_zoo_told_of_optimizers.py::test_what_training_changes_late_of_groups_and_defaults_is_refused_in_that_step"),
    ("reported at the next update: a learning rate that is set in training, which `train.schedule` sets",
     "the trainer sets the rate of each update by train.schedule",
     "zoo/test_zoo_told_of_optimizers.py::test_a_rate_that_is_set_by_hand_has_no_effect_and_is_told"),
    ("reported at the next update, in a script of your own: a model left in evaluation mode",
     "is in evaluation mode at an update",
     "train/test_train_own_steps.py::test_a_loop_that_stays_in_evaluation_mode_is_told"),
    ("float8 buffers and others that Gloo cannot send, several ranks", "which ranks cannot send to each other",
     "train/test_train_comes_back.py::test_a_buffer_that_the_ranks_cannot_share_is_refused"),
    ("an iterable set that gives each rank different items, without `sharded = True`",
     "the ranks read different items from train_data()",
     "zoo/test_zoo_data.py::test_parts_by_rank_are_exact_where_the_task_says_so_and_else_refused"),
    ("random numbers drawn in threads of the set's own", "reads in its own threads, and draws random numbers",
     "zoo/test_zoo_data.py::test_what_cannot_be_exact_is_refused_before_the_first_step"),
    ("a set whose samples depend on the worker that reads them", "gives different samples in a different worker",
     "zoo/test_zoo_data.py::test_samples_that_depend_on_their_worker_are_refused"),
    ("a set whose length differs by rank", "train_data() has a different length on each rank",
     "zoo/test_zoo_data.py::test_a_length_of_each_rank_is_refused"),
    ("a different optimizer from the one at the save", "contains the state of",
     "train/test_train_comes_back.py::test_another_optimizer_is_refused_the_state_of_the_one_before"),
    ("an optimizer with different settings from those at the save, such as `amsgrad`, so that it keeps more",
     "of each parameter, which the checkpoint does not hold",
     "train/test_train_comes_back.py::"
     "test_settings_by_which_an_optimizer_keeps_more_than_was_saved_are_refused"),
    ("reported before the first step: a different number of threads than at the save, on the CPU",
     "when the checkpoint was saved: the last", "train/test_train_said.py::"
     "test_another_number_of_threads_than_at_the_save_is_said"),
    ("a set whose length changed between attempts", "when the checkpoint was saved, and",
     "zoo/test_zoo_data.py::test_a_data_set_that_changed_between_attempts_is_seen"),
    ("reported before the first step: samples that are not what they were at the save, judged by 16 of the set",
     "has changed since the checkpoint was saved",
     "zoo/test_zoo_data.py::test_samples_that_are_others_after_a_resume_are_told"),
    ("reported before the first step: a set in a different order on each rank, such as that of unsorted file names",
     "Every rank has to see the same data set",
     "zoo/test_zoo_data.py::test_samples_that_differ_by_rank_are_told"),
    ("reported before the first step: state of the task that does not come back on a different number of ranks",
     "the checkpoint was saved on a different number of ranks",
     "train/test_train_other_ranks.py::"
     "test_what_ranks_that_are_no_longer_there_have_kept_is_reported_as_lost"),
    ("`setup_distributed(rank, world_size)`", "Call setup_distributed()",
     "train/test_train_distributed.py::test_a_rank_and_a_world_size_are_refused"),
    ("`launch_distributed_training` with a lambda", "top level of a module",
     "train/test_train_distributed.py::test_a_lambda_cannot_be_launched"),
]  # fmt: skip


def tables() -> str:
    """What stands below the mark."""
    from zoo_data import REFUSED_DATA
    from zoo_hf import HF_DATA
    from zoo_table import OF_DATA, OF_MODELS, OF_OPTIMIZERS, OF_RANKS, OF_STEPS, REFUSED

    def grouped(pairs: Iterable[tuple[str, str]]) -> Iterable[tuple[str, str]]:
        found: dict[str, list[str]] = {}
        for key, value in pairs:
            if value not in found.setdefault(key, []):
                found[key].append(value)
        return [(key, ", ".join(values)) for key, values in found.items()]

    def settings(train: Mapping[str, Any]) -> str:
        return ", ".join(f"`{key}: {_yaml(value)}`" for key, value in train.items()) or "-"

    refused = [
        *((f"{case.optimizer} with {case.model}", message, "the second step") for case, message in REFUSED),
        *((f"data: {name}", "no resume could be exact", "the first step") for name in REFUSED_DATA),
    ]
    return "\n".join(
        [
            "\n## Exact: optimizers\n",
            *_table("optimizer", "with the models", grouped((case.optimizer, case.model) for case in OF_OPTIMIZERS)),
            "\n## Exact: models\n",
            *_table("model", "with the optimizers", grouped((case.model, case.optimizer) for case in OF_MODELS)),
            "\n## Exact: data, with 0 and 2 workers\n",
            *(f"- {name}" for name in dict.fromkeys([*(case.data for case in OF_DATA), *HF_DATA])),
            "\n## Exact: losses and settings\n",
            *_table("loss", "settings of `train`", [(case.loss, settings(case.train)) for case in OF_STEPS]),
            "\n## Exact: on 2 and 3 ranks\n",
            *_table(
                "optimizer, model, data, loss",
                "settings of `train`",
                [(", ".join((c.optimizer, c.model, c.data, c.loss)), settings(c.train)) for c in OF_RANKS],
            ),
            "\n## Refused\n",
            "| what | before the end of | a part of the message |\n|---|---|---|",
            *(f"| {what} | {when} | {_escaped(message)} |" for what, message, when in refused),
            "\n## Refused or reported elsewhere\n",
            *_table("what", "a part of the message", [(what, _escaped(message)) for what, message, _ in ELSEWHERE]),
            "",
        ]
    )


def _table(first: str, second: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"| {first} | {second} |\n|---|---|", *(f"| {left} | {right} |" for left, right in rows)]


def _escaped(message: str) -> str:
    return f"`{message}`".replace("|", "\\|")


def _yaml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(part)}" for key, part in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Write the tables into the page."""
    head, _, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(head + MARK + tables())


if __name__ == "__main__":
    main()
