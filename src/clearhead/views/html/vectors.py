"""The vectors of a head at examples of a survey, as data for its page."""

from ...corpus import Survey
from ...corpus.examples import LARGEST
from ...corpus.vectors import HeadVectors
from . import schema
from .survey import Contexts, rounded


def vectors_data(survey: Survey, vectors: HeadVectors) -> schema.SurveyVectors:
    """Return the vectors of each part on their principal components, and their examples."""
    contexts = Contexts(survey)
    examples: list[schema.SurveyVectorExample] = []
    for row in vectors.examples.to_pylist():
        weight = {"value": row["weight"], "keys": [row["key"]], "weights": [row["weight"]]}
        example = contexts.example({**row, **weight, "stratum": LARGEST})
        examples.append({**example, "token_class": row["token_class"], "looks_at": row["looks_at"]})
    return {
        "key_head": vectors.key_head,
        "parts": [
            _part(some, name, some is vectors)
            for some in (vectors, vectors.without_first())
            for name in vectors.parts
        ],
        "why_rotated": vectors.why_rotated,
        "examples": examples,
        "contexts": contexts.stored,
        "spelling": list(contexts.spelling),
        "between": contexts.between,
    }


def _part(vectors: HeadVectors, name: str, every: bool) -> schema.SurveyPart:
    projection = vectors.pca(name)
    return {
        "name": name,
        "all": every,
        "size": vectors.parts[name].shape[1],
        "points": rounded(projection.points.tolist()),
        "shares": projection.shares.tolist(),
    }
