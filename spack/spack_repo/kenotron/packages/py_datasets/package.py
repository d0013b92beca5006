from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyDatasets(PythonPackage):
    """Hugging Face's datasets, in a version that Spack's own packages did not have yet (July 2026)."""

    homepage = "https://github.com/huggingface/datasets"
    pypi = "datasets/datasets-3.6.0.tar.gz"

    license("Apache-2.0")

    version("3.6.0", sha256="1b2bf43b19776e2787e181cfd329cb0ca1a358ea014780c3581e0f276375e041")

    depends_on("py-setuptools", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.9:")
        depends_on("py-dill@0.3.0:0.3.8")
        depends_on("py-filelock")
        depends_on("py-fsspec@2023.1:2025.3.0+http")
        depends_on("py-huggingface-hub@0.24:")
        depends_on("py-multiprocess@:0.70.16")
        depends_on("py-numpy@1.17:")
        depends_on("py-packaging")
        depends_on("py-pandas")
        depends_on("py-pyarrow@15:")
        depends_on("py-pyyaml@5.1:")
        depends_on("py-requests@2.32.2:")
        depends_on("py-tqdm@4.66.3:")
        depends_on("py-xxhash")
