"""`python -m yatt.trainer`: one trainer rank."""

from yatt.trainer.main import main

if __name__ == "__main__":
    main()
