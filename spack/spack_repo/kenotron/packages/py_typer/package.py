from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyTyper(PythonPackage):
    """Command lines from type hints, in a version that Spack's own packages did not have yet (July 2026)."""

    homepage = "https://github.com/fastapi/typer"
    pypi = "typer/typer-0.29.2.tar.gz"

    license("MIT")

    version("0.29.2", sha256="b1998dc5f2c3dedafa1517a9521fa944cc4dc1fadcea085d81a3b10ebcaeb075")

    depends_on("py-pdm-backend", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-annotated-doc@0.0.2:")
        depends_on("py-pydantic@2.5.3:")
        depends_on("py-rich@13.8:")
        depends_on("py-shellingham@1.3:")
