"""`gossamer bench`."""


def run() -> None:
    pass
