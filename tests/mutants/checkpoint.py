"""Bugs of checkpoints: complete or absent, the same on every layout, and nothing lost."""

from __future__ import annotations

from mutants.mutant import Mutant

CRASHES = ("checkpoint/test_checkpoint_crashes.py::test_everything_is_synced_before_the_rename",)
FOLDERS = ("checkpoint/test_checkpoint_folders.py",)
DAMAGE = ("checkpoint/test_checkpoint_damage.py",)
UPLOADS = ("checkpoint/test_remote_checkpoints.py",)
RANKS = ("checkpoint/test_checkpoint_ranks.py",)

MUTANTS = [
    Mutant(
        name="an-average-without-its-weights",
        file="checkpoint/averaging.py",
        find="total += part.share * part.read(",
        replace="total += 1 / len(parts) * part.read(",
        why="a merge of 3 to 1 is the plain mean",
        tests=("checkpoint/test_averaging.py::test_the_weights_are_the_mean_in_float64",),
    ),
    Mutant(
        name="an-average-summed-in-its-own-dtype",
        file="checkpoint/averaging.py",
        find="total = torch.zeros(block.shape, dtype=torch.float64)",
        replace="total = torch.zeros(block.shape, dtype=block.dtype)",
        why="the mean of bfloat16 weights is rounded at every checkpoint (what merging scripts do)",
        tests=("checkpoint/test_averaging.py::test_the_mean_of_bfloat16_is_rounded_once",),
    ),
    Mutant(
        name="a-checkpoint-announced-before-fsync",
        file="checkpoint/durable.py",
        find="                os.fsync(self._file)\n",
        replace="                pass\n",
        why="after a power cut the newest checkpoint has its name and none of its bytes",
        tests=CRASHES,
    ),
    Mutant(
        name="folders-not-synced-before-the-rename",
        file="checkpoint/saving.py",
        find="        sync_folder(folder)\n    manifest",
        replace="        pass\n    manifest",
        why="the files are on the disk, their names are not",
        tests=CRASHES,
    ),
    Mutant(
        name="an-atomic-file-is-not-synced",
        file="storage/files.py",
        find="        if self.durable:\n            os.fsync(self._file)\n",
        replace="",
        why="the rename is on the disk before the bytes: after a power cut the file is empty under its own name",
        tests=("storage/test_files.py",),
    ),
    Mutant(
        name="a-published-folder-is-not-synced",
        file="storage/files.py",
        find="                os.fsync(stream.fileno())\n        sync_folder(Path(folder))\n",
        replace="                pass\n",
        why="a tokenized set appears under its name, and after a power cut its files are empty",
        tests=("storage/test_files.py",),
    ),
    Mutant(
        name="latest-before-the-rename",
        file="checkpoint/folders.py",
        find="    try:\n        os.rename(temporary, final)\n",
        replace="    replace_text(final.parent / LATEST, final.name)\n    try:\n        os.rename(temporary, final)\n",
        why="a kill at the wrong moment leaves latest.txt naming a checkpoint that does not exist",
        tests=("checkpoint/test_checkpoint_crashes.py",),
    ),
    Mutant(
        name="checksums-not-checked",
        file="checkpoint/folders.py",
        find="_wrong_size(path / name, record) or _wrong_content(path / name, record)",
        replace="_wrong_size(path / name, record)",
        why="a flipped byte is loaded in silence, as torch's DCP does",
        tests=DAMAGE,
    ),
    Mutant(
        name="a-changed-manifest-believed",
        file="checkpoint/manifest.py",
        find='    if _seal({key: value for key, value in content.items() if key != "xxh3"}) != data:\n',
        replace="    if False:\n",
        why="the file that proves all others is not proved itself",
        tests=DAMAGE,
    ),
    Mutant(
        name="load-does-not-verify",
        file="checkpoint/loading.py",
        find="    if verify:\n        _raise_if(check_together(",
        replace="    if False:\n        _raise_if(check_together(",
        why="verify=True is accepted and ignored where a run loads its weights",
        tests=(*DAMAGE, *RANKS),
    ),
    Mutant(
        name="retention-deletes-the-newest",
        file="checkpoint/retention.py",
        find="steps[:-keep_last]",
        replace="steps[keep_last:]",
        why="keep_last keeps the first",
        tests=FOLDERS,
    ),
    Mutant(
        name="retention-counts-damaged-checkpoints",
        file="checkpoint/retention.py",
        find="    complete = {entry.step: entry for entry in list_checkpoints(root) if entry.manifest}\n",
        replace="    complete = {entry.step: entry for entry in list_checkpoints(root)[::-1]}\n",
        why="a damaged checkpoint counts as one of keep_last, and the last good one goes",
        tests=FOLDERS,
    ),
    Mutant(
        name="a-manifest-is-uploaded-before-its-files",
        file="checkpoint/upload.py",
        find='        self.store.put(f"{step}/{INCOMPLETE}", data)\n        sent',
        replace='        self.store.put(f"{step}/{MANIFEST}", data)\n        sent',
        why="who resumes while it is uploaded, or after a kill, finds a checkpoint without its weights",
        tests=UPLOADS,
    ),
    Mutant(
        name="an-object-of-the-same-length-counts-as-sent",
        file="checkpoint/upload.py",
        find="self.store.version(place) == (record.bytes, known)",
        replace="True",
        why="all saves of a step are as long as each other: weights of two saves are mixed",
        tests=UPLOADS,
    ),
    Mutant(
        name="a-remote-checkpoint-is-removed-from-its-files-on",
        file="checkpoint/remote.py",
        find='        self.store.delete(f"{step}/{MANIFEST}")\n',
        replace="",
        why="a kill during retention leaves a manifest whose files are gone",
        tests=UPLOADS,
    ),
    Mutant(
        name="what-arrives-is-not-compared",
        file="storage/stores.py",
        find="if not self._same_md5(info, file, size) and not self._same_bytes(name, file, size):",
        replace="if False:",
        why="the only copy of a checkpoint is damaged, and nobody knows before the resume",
        tests=UPLOADS,
    ),
    Mutant(
        name="the-newest-is-the-highest-step",
        file="checkpoint/folders.py",
        find="entry.manifest.saved_at if entry.manifest else 0.0, entry.step",
        replace="bool(entry.manifest), entry.step",
        why="a run that was started over resumes from the abandoned one's last step",
        tests=FOLDERS,
    ),
    Mutant(
        name="one-ranks-tensors-missing",
        file="checkpoint/tensors.py",
        find="        for result in (result for of_rank in results for result in of_rank):\n",
        replace="        for result in (result for of_rank in results[:1] for result in of_rank):\n",
        why="the index lists what rank 0 wrote: the optimizer state of the others is lost (KempnerForge #202)",
        tests=RANKS,
    ),
    Mutant(
        name="resharding-reads-from-the-chunks-start",
        file="checkpoint/tensors.py",
        find="source = source.narrow(dimension, start, length)",
        replace="source = source.narrow(dimension, 0, length)",
        why="on another layout every rank loads the first rows of each chunk that it meets",
        tests=RANKS,
    ),
]
