"""Checkpoints: atomic, loadable on any layout, in plain files that other tools can read.

    saved = save("checkpoints", 10, model=parameters, optimizer=flat_state, state={"consumed_tokens": 2560},
                 config_yaml=text, model_config={"hidden_size": 64})
    tidy("checkpoints")                                            # at the next start
    path = newest_complete("checkpoints", report=print)               # reports and skips damaged checkpoints
    state = load(path, model=parameters, optimizer=flat_state, verify=False)

    <root>/latest.txt               the newest step, written last
    <root>/<step>/manifest.json     step, state, and the size and XXH3 of every other file
    <root>/<step>/config.yaml, model_config.json, tokenizer/
    <root>/<step>/model/, optimizer/, hooks/     index.json and one safetensors file a rank (see `tensors.py`)

checkpoints.py                the interface between training and its checkpoints: read this first
start.py, restart.py          where a run starts: its own newest checkpoint, or another run's
folders.py, manifest.py       which checkpoints a folder has, and whether one is complete; leftovers.py, retention.py
engine.py, engines/           how long training waits for a save
saving.py, loading.py         one checkpoint: the order of writes that makes it complete, and the way back
tensors.py, index.py          its tensors; write_plan.py: which rank writes which of them
tensor_writer.py              writes them, by file_writer.py, durable.py, native.py
reading.py, hf_files.py       for tools, in one process
model_files.py                where a model is: a checkpoint, a Hugging Face folder, the hub
text_files.py                 the tokenizer beside the weights
local.py                      frequent checkpoints on the machines' own disks
remote.py, upload.py          checkpoints in a bucket: downloads and uploads, imported only for configs with a URL

Everything but tensors is JSON or YAML; nothing is a pickle. torch is imported only when a tensor is used.
"""
