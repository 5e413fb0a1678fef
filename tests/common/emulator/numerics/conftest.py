import numpy as np
import pytest


@pytest.fixture(autouse=True)
def silent_floating_point():
    """The functions under test leave NumPy's warnings to their caller."""
    with np.errstate(all="ignore"):
        yield
