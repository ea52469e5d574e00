"""One finished request as OTLP-JSON, for any viewer of traces: the same spans that an exporter sends."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gateway.telemetry.record import RequestRecord


def otlp_document(record: "RequestRecord", service_name: str) -> dict[str, Any]:
    """An ``ExportTraceServiceRequest`` by OTLP's JSON mapping, which unlike protobuf's own writes ids in hexadecimal.

    https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding

    Blocks, the first time for 0.2 s: call it in a thread.
    """
    # The SDK costs 20 MB, which a gateway that exports nothing need not pay before somebody asks.
    from gateway.telemetry.export import otlp_json  # noqa: PLC0415
    from gateway.telemetry.recording import encoded, resource_of  # noqa: PLC0415

    return otlp_json(encoded([record], resource_of(service_name)))
