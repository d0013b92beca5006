"""Hooks that watch a run: `observers` builds the hooks that a config enables.

signals.py        stops the run on SIGTERM, SIGUSR1, Ctrl-C, or if a file appears
validation.py     computes the loss on held-out documents
data_stall.py     logs steps that wait long for their batches
stragglers.py     logs ranks that are slower than the others
nonfinite.py      finds the origin of NaN or infinity
module_buffers.py     synchronizes and restores buffers that a foreign module writes
consistency.py    checks that ranks read the same data and hold the same weights; a hash of the weights for metrics
spikes.py         skips steps with spikes of loss or gradient
snapshot.py       a copy of weights and optimizer in host memory
layer_statistics.py   norms and activations of every layer, and the gradient noise scale
replay.py         the hook of `kenotron replay`
progress.py       shows a progress bar, or a line with the ETA
history.py        writes the starts and ends of the run to a file
tensorboard.py    writes the metrics for TensorBoard
trackers.py       sends the metrics to Weights & Biases and Trackio
expert_load.py    measures how evenly the experts of a mixture are used
doremi.py         learns weights of the domains with a reference model
samples.py        logs completions of `logging.sample_prompts`
profiler.py       torch's trace of some steps, its snapshot of GPU memory, its anomaly mode
benchmark.py      writes the row of `general.benchmark_csv_path`
export.py         `checkpoints.export_hf`: exports every checkpoint for transformers
evaluation.py     `evaluation`: evaluates checkpoints on tasks, in a process beside training
uploads.py        uploads checkpoints to S3 and other stores

Training does not import them: its caller passes them in (`kenotron.launch.training`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.models.foreign import ForeignArchitecture
from kenotron.observers.benchmark import Benchmark
from kenotron.observers.consistency import Replicas, SameData, StateHash
from kenotron.observers.data_stall import LONG_S, DataStall
from kenotron.observers.expert_load import ExpertLoad
from kenotron.observers.export import ExportHook
from kenotron.observers.history import History
from kenotron.observers.nonfinite import NonFiniteCause
from kenotron.observers.profiler import AnomalyMode, MemorySnapshot, ProfilerHook
from kenotron.observers.progress import Pace, Progress
from kenotron.observers.signals import KillSwitch, Signals
from kenotron.observers.tensorboard import TensorBoard
from kenotron.observers.trackers import TrackioHook, WandbHook
from kenotron.observers.validation import Validation

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.parallel.mesh import Mesh
    from kenotron.training.hooks import Hook


def observers(config: Config, mesh: Mesh) -> list[Hook]:
    """Build the hooks that `config` enables on this rank of `mesh`. Hooks that only write are on the first rank."""
    stalls = DataStall(min(LONG_S, config.parallelism.timeout_seconds))
    hooks: list[Hook] = [Signals(), NonFiniteCause(), stalls]
    if config.profiler is not None and config.profiler.detect_anomaly:
        hooks.append(AnomalyMode())
    if config.profiler is not None and config.profiler.memory_snapshot_path is not None:
        hooks.append(MemorySnapshot(config.profiler))
    if mesh.world_size > 1:
        from kenotron.observers.stragglers import Stragglers

        hooks += [SameData(), Stragglers()]
        if not config.general.ignore_sanity_checks:
            hooks.append(Replicas())
    if config.logging.state_hash:
        hooks.append(StateHash())
    if config.metrics_logging is not None and config.metrics_logging.log_level:
        from kenotron.observers.layer_statistics import GradientNoise, LayerStatistics

        hooks.append(LayerStatistics(config.metrics_logging))
        if config.metrics_logging.gradient_noise_scale:
            hooks.append(GradientNoise(config.metrics_logging))
    if config.optimizer.spikes is not None:
        from kenotron.observers.spikes import SpikeGuard

        hooks.append(SpikeGuard(config.optimizer.spikes))
    if isinstance(config.model.decoder, ForeignArchitecture):
        from kenotron.observers.module_buffers import ModuleBuffers

        hooks.append(ModuleBuffers())
    if config.doremi is not None and config.doremi.ref_model_resume_checkpoint_path is not None:
        from kenotron.observers.doremi import ProxyOfReference

        hooks.append(ProxyOfReference(config.doremi, config.doremi.ref_model_resume_checkpoint_path))
    if config.logging.sample_prompts:
        from kenotron.observers.samples import SampleCompletions

        hooks.append(SampleCompletions())
    if config.model.decoder.experts:
        hooks.append(ExpertLoad())
    if config.checkpoints.export_hf:
        hooks.append(ExportHook())
    if config.tokens.validates or config.tokens.limit_test_batches:
        hooks.append(Validation())
    return [*hooks, *_first_rank_hooks(config)] if mesh.is_first else hooks


def _first_rank_hooks(config: Config) -> list[Hook]:
    hooks: list[Hook] = [Progress() if sys.stdout.isatty() else Pace(), History()]
    if config.logging.tensorboard:
        hooks.append(TensorBoard())
    if config.logging.wandb is not None:
        hooks.append(WandbHook(config.logging.wandb))
    if config.logging.trackio is not None:
        hooks.append(TrackioHook(config.logging.trackio))
    if config.upload_url is not None:
        from kenotron.observers.uploads import Uploads

        hooks.append(Uploads(config, config.upload_url))
    if config.evaluation is not None:
        from kenotron.observers.evaluation import EvaluationHook

        hooks.append(EvaluationHook(config.evaluation))
    if config.general.kill_switch_path is not None:
        hooks.append(KillSwitch(Path(config.general.kill_switch_path)))
    if config.general.benchmark_csv_path is not None:
        hooks.append(Benchmark(Path(config.general.benchmark_csv_path)))
    if config.profiler is not None and config.profiler.profiler_export_path is not None:
        hooks.append(ProfilerHook())
    return hooks
