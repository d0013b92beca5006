"""Samples that validation reads: the last ones of a source."""

from kenotron.data.source import SampleRange, TokenSource


def hold_out_last(whole: TokenSource, count: int, kind: type[SampleRange] = SampleRange) -> SampleRange:
    """`whole` without its last `count` samples, which are held out."""
    border = len(whole) - count
    return kind(whole, 0, border, kind(whole, border, len(whole)))


def held_out_samples(samples: int, fraction: float) -> int:
    """How many of so many samples are held out: the last ones, of two or more at least one."""
    return max(int(samples * fraction), 1 if samples > 1 else 0)
