"""Files, on this machine and on others.

    files.py             atomic writes, published folders, locks: one implementation of each
    paths.py             as_path: a local path, or a RemotePath of the storage that serves the URL's scheme
    arrays.py            arrays mapped from files; slices of many at once, local or remote
    background.py        how a process begins that works beside training

    fsspec_storage.py    the storage of s3, gs, hf, https …, loaded when a URL is met
      ├── fetching.py    retries, and blocks that are fetched once however many threads ask
      ├── blocks.py      the fetched blocks on this machine's disk, bounded
      └── drivers.py     fsspec's file systems, each made to fail at once and to report versions;
                         two of them in google.py and hub_filesystem.py
    stores.py            writing: objects, sent and compared with what was to be sent
    hub.py               files of Hugging Face repositories
    native.py            C++ that is compiled when it is first used

Readers of files see a `pathlib.Path` or a `RemotePath`, which has the same methods.
"""
