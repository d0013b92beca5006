from kenotron.cli.generate import seeds_main

if __name__ == "__main__":
    seeds_main()
