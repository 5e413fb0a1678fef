from common.compiler import keep_headers


def pytest_configure() -> None:
    keep_headers()
