from kenotron.cli.nanotron_scripts import slurm_launcher

if __name__ == "__main__":
    slurm_launcher()
