from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyAnnotatedDoc(PythonPackage):
    """Documentation in type annotations, which typer needs and Spack's own packages do not have (July 2026)."""

    homepage = "https://github.com/fastapi/annotated-doc"
    pypi = "annotated-doc/annotated_doc-0.0.7.tar.gz"

    license("MIT")

    version("0.0.7", sha256="0a30ef8f5322a4173720ae6712dc9a5e58f5a19868f3f167b4b5778db066c2b5")

    depends_on("py-pdm-backend", type="build")
    depends_on("python@3.11:", type=("build", "run"))
