import pytest

from common.emulator.machine import blas


def test_one_thread_for_a_while():
    switch = blas._thread_switch()
    if switch is None:
        pytest.skip("this NumPy has another BLAS")
    get, put = switch
    before = get()
    try:
        put(2)
        with pytest.raises(RuntimeError), blas.one_blas_thread():
            assert get() == 1
            raise RuntimeError
        assert get() == 2
    finally:
        put(before)


def test_another_blas_is_left_alone(monkeypatch):
    monkeypatch.setattr(blas, "_thread_switch", lambda: None)
    with blas.one_blas_thread():
        pass
