from spack_repo.builtin.build_systems.bundle import BundlePackage

from spack.package import *


class PyNanotron(BundlePackage):
    """py-kenotron by the name that the first Kénotron's documents use."""

    homepage = "https://github.com/korovod/kenotron"

    version("main")
    version("0.4.0")

    variant("datastates", default=False, description="As of py-kenotron")
    variant("py-datastates", default=False, description="Another spelling of datastates")
    variant("nanosets", default=True, description="As of py-kenotron")

    with default_args(type="run"):
        depends_on("py-kenotron@main", when="@main")
        depends_on("py-kenotron@0.4.0", when="@0.4.0")
        depends_on("py-kenotron+datastates", when="+datastates")
        depends_on("py-kenotron+datastates", when="+py-datastates")
        depends_on("py-kenotron+nanosets", when="+nanosets")
        depends_on("py-kenotron~nanosets", when="~nanosets")
