from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyKenotron(PythonPackage):
    """Pretrain language models from one YAML file, in one process or on any parallel layout."""

    homepage = "https://github.com/korovod/kenotron"
    git = "https://github.com/korovod/kenotron.git"

    license("Apache-2.0")

    version("main", branch="main")
    version("0.4.0", tag="v0.4.0", commit="f2c83832cc787621388bc54afbc0f003ac2af9fc")  # the first Kénotron

    variant("cuda", default=False, description="torch for NVIDIA GPUs: add ^py-torch cuda_arch=90")
    variant("rocm", default=False, description="torch for AMD GPUs: add ^py-torch amdgpu_target=gfx942")
    variant("flash", default=False, description="FlashAttention 2, for softcaps", when="+cuda")
    variant("plots", default=False, description="matplotlib, for pictures of benchmarks", when="@main")
    variant("datastates", default=False, description="Lazy checkpoints: a part of main in any case")
    variant("nanosets", default=True, description="Folders of token files: a part of main in any case")

    conflicts("+cuda", when="+rocm")
    conflicts("+datastates", when="@0.4.0", msg="0.4.0 needs py-datastates for it, which no repository here has")

    with default_args(type="build"):
        depends_on("py-setuptools@77:")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-torch+distributed+gloo")  # layouts on CPUs use gloo
        depends_on("py-torch+cuda", when="+cuda")
        depends_on("py-torch+rocm", when="+rocm")
        depends_on("py-torch~cuda", when="~cuda")
        depends_on("py-torch~rocm", when="~rocm")
        depends_on("py-flash-attn@2.7:", when="+flash")

    with when("@main"), default_args(type=("build", "run")):
        depends_on("py-torch@2.11:")
        depends_on("py-numpy@1.26:")
        depends_on("py-pydantic@2.9:")
        depends_on("py-pyyaml@6.0:")
        depends_on("py-typer@0.29:")
        depends_on("py-rich@13.7:")
        depends_on("py-tokenizers@0.21:")
        depends_on("py-transformers@4.56:")
        depends_on("py-datasets@3.6:")
        depends_on("py-safetensors@0.5:")
        depends_on("py-tensorboard@2.18:")
        depends_on("py-xxhash@3.5:")
        depends_on("py-fsspec@2024.6:")
        depends_on("py-matplotlib@3.9:", when="+plots")
        depends_on("arrow+brotli+csv+dataset+filesystem+lz4+parquet+snappy+zlib+zstd")  # what parquet files need

    with when("@0.4.0"), default_args(type=("build", "run")):
        depends_on("py-torch@2.5:")
        depends_on("py-numpy@2.1:")
        depends_on("py-dacite")
        depends_on("py-packaging")
        depends_on("py-pyyaml")
        depends_on("py-safetensors")
        depends_on("py-tqdm")
        depends_on("py-transformers")
        depends_on("py-wandb")
        depends_on("py-datatrove", when="+nanosets")
        depends_on("py-numba", when="+nanosets")
