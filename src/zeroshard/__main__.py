"""`python -m zeroshard`, which is how torchrun starts a rank."""

from zeroshard.cli.main import main

main()
