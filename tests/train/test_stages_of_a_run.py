"""Stages and sources from the side of the run: its end when data are used up, what may be edited, what is measured."""

from __future__ import annotations

from pathlib import Path

from tiny_run import metrics, tiny_config, train_and_listen, train_quietly

LIMITED = "data_stages.0.data.dataset={source: user_parts.counting, max_epochs: 0.01, kwargs: {rows: 1100}}"


def test_a_run_whose_data_are_used_up_ends_in_good_order(tmp_path: Path) -> None:
    """1,095 rows are trained on, of which 10 may be: two steps of four."""
    overrides = (LIMITED, "tokens.train_steps=9", "tokens.val_check_interval=50", "tokens.limit_val_batches=1")
    run, said = train_and_listen(tiny_config(tmp_path, *overrides, "checkpoints.save_final_state=false"))
    assert (run.step, run.stop_reason) == (2, "'user_parts.counting' has given its 0.01 epochs")
    assert [step["iteration"] for step in metrics(run.config)] == [1, 2]
    assert "val_loss" in metrics(run.config)[-1]  # as after every last step
    assert (tmp_path / "checkpoints" / "2").is_dir()
    assert "counting reaches its 0.01 epochs at step 3: the run ends after step 2" in said
    assert "Run stopped ('user_parts.counting' has given its 0.01 epochs) at step 2 of 9" in said
    _, said = train_and_listen(tiny_config(tmp_path, *overrides))
    assert "This run is finished: after step 2 of 9, 'user_parts.counting' has given its 0.01 epochs" in said
    assert len(metrics(run.config)) == 2


def test_a_run_goes_on_with_the_sources_that_are_left_and_resumes_there(tmp_path: Path) -> None:
    parts = "{weight: 1, source: user_parts.counting, max_epochs: 0.01}, {weight: 3, source: user_parts.counting_down}"
    mixed = (
        f"data_stages.0.data.dataset={{mixture: [{parts}]}}",
        "data_stages.0.data.when_exhausted=renormalise",
        "checkpoints.checkpoint_interval=5",
    )
    whole = train_quietly(tiny_config(tmp_path / "whole", *mixed, "tokens.train_steps=14"))
    assert [end for _, end in whole.data.stage_of(1).order.mixing.reached] == [38]  # within step 10
    for steps in (5, 10, 14):
        run = train_quietly(tiny_config(tmp_path / "parts", *mixed, f"tokens.train_steps={steps}"))
    assert [s["lm_loss"] for s in metrics(run.config)] == [s["lm_loss"] for s in metrics(whole.config)]
