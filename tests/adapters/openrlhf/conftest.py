from tests.adapters.openrlhf.load import load_openrlhf

load_openrlhf()
