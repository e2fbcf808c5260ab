"""The lifted trainer graph was never replayed; valid when it was, with attention injected and said so."""

from tests.verify.toy_transformer import build, with_meta


def refuted():
    return with_meta(build("train"), replay=None), build("infer")


def twin():
    return build("train"), with_meta(
        build("infer"), replay={"passed": True, "cases": ["decode"], "injected": ["attention"]}
    )
