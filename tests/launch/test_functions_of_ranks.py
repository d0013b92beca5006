"""Work reaches a rank's process by its function's name."""

from pkgutil import resolve_name

import pytest

from kenotron.launch.functions import function_path
from kenotron.training import train
from kenotron.training.compare import record


@pytest.mark.parametrize(
    ("work", "path"), [(train, "kenotron.training:train"), (record, "kenotron.training.compare:record")]
)
def test_a_function_is_found_again_by_its_path(work: object, path: str) -> None:
    assert function_path(work) == path  # type: ignore[arg-type]
    assert resolve_name(path) is work


def test_a_function_that_another_process_cannot_import_is_refused() -> None:
    def local() -> None: ...

    with pytest.raises(ValueError, match="move it to the top of a module"):
        function_path(local)
