import sys

from hf_striped.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
