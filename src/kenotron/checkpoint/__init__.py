"""Checkpoints: atomic, loadable on any layout, in plain files that other tools can read.

    saved = save("checkpoints", 10, model=parameters, optimizer=flat_state, state={"consumed_tokens": 2560},
                 config_yaml=text, model_config={"hidden_size": 64})
    tidy("checkpoints")                                            # at the next start
    path = newest_complete("checkpoints", report=print)               # names and skips what is damaged
    state = load(path, model=parameters, optimizer=flat_state, verify=False)

    <root>/latest.txt               the newest step, written last
    <root>/<step>/manifest.json     step, state, and the size and XXH3 of every other file
    <root>/<step>/config.yaml, model_config.json, tokenizer/
    <root>/<step>/model/, optimizer/, hooks/     index.json and one safetensors file a rank (see `tensors.py`)

`remote.py` downloads checkpoints from a bucket, `upload.py` uploads them; both are loaded where a config has a URL.

Tensors go through `torch.distributed.checkpoint`; everything else is JSON or YAML; nothing is a pickle.
Neither torch nor DCP is imported before a tensor is touched.
"""
