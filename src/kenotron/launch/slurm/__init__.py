"""Slurm: a training run as a job, and jobs that are running.

    kenotron submit my.yaml --nodes 4 --time 20:00:00
      │ submitting.py the config, the number of nodes, what is probably not meant
      │ sites.py     what the site needs: modules, options of sbatch and srun, binding to cores
      │ script.py    the job script, plain bash: one task a rank, saved and requeued before the time limit
      ▼ jobs.py      sbatch, and a record of the job beside its log
    logs/slurm/<name>-<time>/   config.yaml, job.sbatch, job.json, <job id>.log

Ranks started by srun need no torchrun: they read their numbers from Slurm's variables (`ranks.py`).
nanotron.py is nanotron's `slurm_launcher.py`, flag by flag.
"""
