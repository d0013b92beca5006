"""Choose the layout of a model for decoding by the number of processes, and check it against its shapes."""

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.errors import InputError, counted
from kenotron.config.parallelism import Parallelism


def choose_layout(
    dp: int | None, pp: int | None, tp: int | None, saved: Parallelism, processes: int | None, ep: int = 1
) -> Parallelism:
    """Return the degrees that are not None, and choose the others for the `processes` that torchrun has started.

    The others are the degrees that the checkpoint was `saved` on, with as many replicas as processes allow, if that
    fits, else 1. `ep` replicas share the experts, so dp is at least ep. Raises InputError if the degrees need another
    number of processes, or ep does not divide dp.

    >>> choose_layout(None, None, None, Parallelism(dp=4, pp=2, tp=2), 8)
    Parallelism(dp=2, pp=2, tp=2)
    """
    layout = Parallelism(dp=dp or ep, pp=pp or 1, tp=tp or 1, expert_parallel_size=ep)
    if layout.dp % ep:
        raise InputError(f"--ep: expected a divisor of --dp {layout.dp}, whose ranks share the experts; found {ep}")
    if processes is None:
        return layout
    pp, tp = pp or saved.pp, tp or saved.tp
    fitting = Parallelism(dp=dp or max(ep, processes // (pp * tp)), pp=pp, tp=tp, expert_parallel_size=ep)
    if fitting.world_size == processes:
        return fitting
    if layout.world_size != processes:
        raise InputError(
            f"--dp {layout.dp} x --pp {layout.pp} x --tp {layout.tp} needs {counted(layout.world_size, 'process')}, "
            f"but {processes} were started"
        )
    return layout


def check_layout(model: DecoderArchitecture, layout: Parallelism) -> None:
    """Raise InputError if the model's shapes do not allow a degree, named as on the command line, ``--tp``."""
    problems = [f"--tp: {problem}" for problem in model.tp_problems(layout.tp)]
    problems += [f"--ep: {problem}" for problem in model.ep_problems(layout.expert_parallel_size)]
    problems += [f"--pp: {problem}" for problem in model.pp_problems(layout.pp) if layout.pp > 1]
    if layout.pp > model.num_hidden_layers:
        problems.append(f"--pp: expected at most num_hidden_layers {model.num_hidden_layers} stages, found {layout.pp}")
    if problems:
        raise InputError("\n".join(problems))
