"""Native code: compiled once, refused in one line, and equal to its Python reference in the example of the docs."""

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenotron.config import InputError
from kenotron.storage.native import find_compiler, load_library
from support.pages import files, read_page
from support.tiny_run import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "native"
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@needs_compiler
def test_a_library_is_compiled_once_for_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path / "sums.cpp", 'extern "C" double total(const double* x, long n) {double s = 0;'
                     "for (long i = 0; i < n; ++i) s += x[i]; return s;}")  # fmt: skip
    compiled: list[object] = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *given, **more: compiled.append(1) or run(*given, **more))
    for _ in range(2):
        library = load_library(source)
        library.total.argtypes, library.total.restype = [ctypes.c_void_p, ctypes.c_long], ctypes.c_double
        numbers = np.arange(1000.0)
        assert library.total(numbers.ctypes.data, 1000) == 999 * 500
    assert len(compiled) == 1
    written(source, 'extern "C" int seven() {return 7;}')
    assert load_library(source).seven() == 7
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load_library(source).seven() == 7  # on a machine without a compiler, from the cache
    assert len(compiled) == 2


@needs_compiler
def test_a_library_for_other_flags_is_another_one(tmp_path: Path) -> None:
    source = written(tmp_path / "number.cpp", 'extern "C" int number() {return NUMBER;}')
    assert [load_library(source, f"-DNUMBER={number}").number() for number in (1, 2)] == [1, 2]


def test_without_a_compiler_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"y\.cpp: no C\+\+ compiler to compile it: expected \$CXX, or one of c\+\+"):
        load_library(written(tmp_path / "y.cpp", "int y;"))


@needs_compiler
def test_what_the_compiler_refuses_is_named_and_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(InputError, match=r"sums\.cpp: .+ cannot compile it: .*sums\.cpp:2:.*error"):
        load_library(written(tmp_path / "sums.cpp", "int fine;\nnonsense"))
    assert not list((own_cache / "native").iterdir())
    with pytest.raises(InputError, match=r"none\.cpp: cannot be read: No such file"):
        load_library(tmp_path / "none.cpp")


# ---- the example ------------------------------------------------------------------------------------------------


@pytest.fixture
def markov(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(EXAMPLE)
    import markov

    yield markov
    del sys.modules["markov"]


def test_the_page_shows_the_files_of_the_example() -> None:
    shown = files(read_page("native-extensions.md"))
    for name in ("markov.cpp", "markov.py"):
        assert shown[name] == (EXAMPLE / name).read_text()


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_compiler)])
def test_the_example_generates_the_chain(native: bool, markov: Any) -> None:
    """Against the recurrence in Python's integers."""
    source = markov.MarkovTokens(50, seed=42, vocab_size=64, native=native)
    for index in (0, 1, 123_456_789, len(source) - 1):
        state, token, expected = 42 * 2**32 + index, 0, []
        for _ in range(51):
            state = (6364136223846793005 * state + 1442695040888963407) & (2**64 - 1)
            token = (token + 1 + state // 2**62) % 64
            expected.append(token)
        assert source[index].tolist() == expected
    steps = np.diff(np.concatenate([source[index] for index in range(200)])) % 64
    assert set(steps[np.arange(len(steps)) % 51 != 50]) == {1, 2, 3, 4}
