from kenotron.cli.nanotron_scripts import run_generate

if __name__ == "__main__":
    run_generate()
