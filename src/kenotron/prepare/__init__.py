"""Text → tokens on disk, once and for all: tokenize, shuffle, merge.

    texts ──▶ tokenize ──▶ 00000.ds 00001.ds … manifest.json ──▶ merge ──▶ fewer files, documents shuffled over all

The bytes that come out are a function of what goes in and of the options: never of the number of workers, nor of how
often the work was killed and begun again.
"""
