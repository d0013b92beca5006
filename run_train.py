from kenotron.cli.nanotron_scripts import run_train

if __name__ == "__main__":
    run_train()
