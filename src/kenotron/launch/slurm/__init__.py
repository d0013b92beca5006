"""Submit training runs as Slurm jobs, and list, find and cancel these jobs.

    kenotron submit my.yaml --nodes 4 --time 20:00:00
      │ submitting.py loads the config, chooses the number of nodes, and warns of probable mistakes
      │ sites.py      loads the site's profile: modules, options of sbatch and srun, binding to cores
      │ script.py     writes the job script in plain bash: one task per rank, saved and requeued before the time limit
      ▼ jobs.py       calls sbatch, and writes a record of the job beside its log
    logs/slurm/<name>-<time>/   config.yaml, job.sbatch, job.json, <job id>.log

Ranks that srun starts need no torchrun: they read their numbers from Slurm's variables (`ranks.py`). nanotron.py
translates the flags of nanotron's `slurm_launcher.py`.
"""
