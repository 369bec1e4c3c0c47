// Sends one counter, one span and one log record over each of OTLP's three spellings, with the SDK's own exporters.
// Usage: node send.mjs HTTP_BASE_URL GRPC_URL. Prints one line of JSON an export; exits with 1 when one failed.
import { SeverityNumber } from "@opentelemetry/api-logs";
import { OTLPLogExporter as LogGrpc } from "@opentelemetry/exporter-logs-otlp-grpc";
import { OTLPLogExporter as LogHttp } from "@opentelemetry/exporter-logs-otlp-http";
import { OTLPLogExporter as LogProto } from "@opentelemetry/exporter-logs-otlp-proto";
import { OTLPMetricExporter as MetricGrpc } from "@opentelemetry/exporter-metrics-otlp-grpc";
import { OTLPMetricExporter as MetricHttp } from "@opentelemetry/exporter-metrics-otlp-http";
import { OTLPMetricExporter as MetricProto } from "@opentelemetry/exporter-metrics-otlp-proto";
import { OTLPTraceExporter as TraceGrpc } from "@opentelemetry/exporter-trace-otlp-grpc";
import { OTLPTraceExporter as TraceHttp } from "@opentelemetry/exporter-trace-otlp-http";
import { OTLPTraceExporter as TraceProto } from "@opentelemetry/exporter-trace-otlp-proto";
import { resourceFromAttributes } from "@opentelemetry/resources";
import { InMemoryLogRecordExporter, LoggerProvider, SimpleLogRecordProcessor } from "@opentelemetry/sdk-logs";
import { MeterProvider, MetricReader } from "@opentelemetry/sdk-metrics";
import { BasicTracerProvider, InMemorySpanExporter, SimpleSpanProcessor } from "@opentelemetry/sdk-trace-base";

const [httpUrl, grpcUrl] = process.argv.slice(2);
const resource = resourceFromAttributes({ "service.name": "js-sender" });

class OnDemand extends MetricReader {
  async onForceFlush() {}
  async onShutdown() {}
}

async function metrics() {
  const reader = new OnDemand();
  const meter = new MeterProvider({ resource, readers: [reader] }).getMeter("js");
  meter.createCounter("js.counter", { unit: "1" }).add(7, { colour: "green" });
  return (await reader.collect()).resourceMetrics;
}

function spans() {
  const memory = new InMemorySpanExporter();
  const provider = new BasicTracerProvider({ resource, spanProcessors: [new SimpleSpanProcessor(memory)] });
  provider.getTracer("js").startSpan("js span", { attributes: { colour: "green" } }).end();
  return memory.getFinishedSpans();
}

function records() {
  const memory = new InMemoryLogRecordExporter();
  const provider = new LoggerProvider({ resource, processors: [new SimpleLogRecordProcessor({ exporter: memory })] });
  provider.getLogger("js").emit({ severityNumber: SeverityNumber.INFO, body: "js record", attributes: { colour: "green" } });
  return memory.getFinishedLogRecords();
}

const exports_ = [
  ["metrics", "json", new MetricHttp({ url: `${httpUrl}/v1/metrics` }), await metrics()],
  ["metrics", "protobuf", new MetricProto({ url: `${httpUrl}/v1/metrics` }), await metrics()],
  ["metrics", "grpc", new MetricGrpc({ url: grpcUrl }), await metrics()],
  ["traces", "json", new TraceHttp({ url: `${httpUrl}/v1/traces` }), spans()],
  ["traces", "protobuf", new TraceProto({ url: `${httpUrl}/v1/traces`, compression: "gzip" }), spans()],
  ["traces", "grpc", new TraceGrpc({ url: grpcUrl, compression: "gzip" }), spans()],
  ["logs", "json", new LogHttp({ url: `${httpUrl}/v1/logs` }), records()],
  ["logs", "protobuf", new LogProto({ url: `${httpUrl}/v1/logs` }), records()],
  ["logs", "grpc", new LogGrpc({ url: grpcUrl }), records()],
];

let failed = false;
for (const [signal, spelling, exporter, data] of exports_) {
  const result = await new Promise((resolve) => exporter.export(data, resolve));
  failed ||= result.code !== 0;
  console.log(JSON.stringify({ signal, spelling, code: result.code, error: result.error?.message ?? null }));
  await exporter.shutdown();
}
process.exit(failed ? 1 : 0);
