from kenotron.cli.seeds import slurm_launcher

if __name__ == "__main__":
    slurm_launcher()
