import sys

from hf_striped.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
