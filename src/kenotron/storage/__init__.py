"""Access files on this machine and on others.

    files.py             atomic writes, published folders, locks: one implementation of each
    paths.py             as_path: a local path, or a RemotePath of the storage for the URL's scheme
    arrays.py            arrays mapped from files; many slices at once, local or remote
    background.py        the start of a process that works beside training

    fsspec_storage.py    the storage of s3, gs, hf, https …, imported for the first such URL
      ├── fetching.py    retries, and blocks that are fetched once for all threads
      ├── blocks.py      the cache of fetched blocks on this machine's disk, of bounded size
      └── drivers.py     fsspec's file systems, changed to fail at once and to report versions;
                         two of them in google.py and hub_filesystem.py
    stores.py            writes objects and compares them with their files
    hub.py               files of Hugging Face repositories
    native.py            C++ that is compiled at first use

Readers of files see a `pathlib.Path` or a `RemotePath`, which has the same methods.
"""
