"""One finished request as OTLP-JSON, for any viewer of traces: the same spans that an exporter sends."""

import base64
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gateway.telemetry.record import RequestRecord

_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})


def otlp_document(record: "RequestRecord", service_name: str) -> dict[str, Any]:
    """An ``ExportTraceServiceRequest`` by OTLP's JSON mapping, which unlike protobuf's own writes ids in hexadecimal.

    https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding

    Blocks, the first time for 0.2 s: call it in a thread.
    """
    # The SDK costs 20 MB, which a gateway that exports nothing need not pay before somebody asks.
    from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]  # noqa: PLC0415
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans  # noqa: PLC0415

    from gateway.telemetry.recording import resource_of, spans_of  # noqa: PLC0415

    message = encode_spans(spans_of(record, resource_of(service_name)))
    document: dict[str, Any] = MessageToDict(message, use_integers_for_enums=True)
    for group in document["resourceSpans"]:
        for scope in group["scopeSpans"]:
            for span in scope["spans"]:
                _spell_ids(span)
                for link in span.get("links", ()):
                    _spell_ids(link)
    return document


def _spell_ids(part: dict[str, Any]) -> None:
    for name in _IDS & part.keys():
        part[name] = base64.b64decode(part[name]).hex()
