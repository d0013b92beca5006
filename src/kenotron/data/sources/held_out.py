"""Hold out the last samples of a source for validation."""

from kenotron.data.source import SampleRange, TokenSource


def hold_out_last(whole: TokenSource, count: int, kind: type[SampleRange] = SampleRange) -> SampleRange:
    """Return `whole` without its last `count` samples, which are held out."""
    border = len(whole) - count
    return kind(whole, 0, border, kind(whole, border, len(whole)))


def held_out_samples(samples: int, fraction: float) -> int:
    """Return how many of `samples` samples are held out: at least one if there are two or more."""
    return max(int(samples * fraction), 1 if samples > 1 else 0)
