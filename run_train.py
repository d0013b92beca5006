from kenotron.cli.train import seeds_main

if __name__ == "__main__":
    seeds_main()
