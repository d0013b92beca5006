from kenotron.cli.seeds import run_generate

if __name__ == "__main__":
    run_generate()
