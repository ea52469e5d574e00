// The last minutes, as the page itself has seen them: rates from differences of totals, times to first token from requests.

const KEPT = 300;

/** A quantile of sorted values by nearest rank; null of none. */
export function quantile(sorted, share) {
  return sorted.length ? sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] : null;
}

export class History {
  constructor() {
    this.points = [];
    this.waits = [];
    this.last = null;
  }

  requests(rows) {
    for (const row of rows) if (row.ttft !== null && !row.error) this.waits.push(row.ttft);
  }

  fleet(document) {
    const now = { time: document.time, ...document.totals };
    const before = this.last;
    this.last = now;
    if (before === null || now.time <= before.time || now.accepted < before.accepted) return;
    const seconds = now.time - before.time;
    const prompt = now.prompt_tokens - before.prompt_tokens;
    const waits = this.waits.sort((a, b) => a - b);
    this.waits = [];
    this.points.push({
      time: now.time,
      rate: (now.completed + now.failed + now.client_gone - before.completed - before.failed - before.client_gone) / seconds,
      failed: (now.failed - before.failed) / seconds,
      flying: now.in_flight,
      p50: quantile(waits, 0.5),
      p95: quantile(waits, 0.95),
      prompt,
      cached: now.cached_tokens - before.cached_tokens,
      output: (now.output_tokens - before.output_tokens) / seconds,
    });
    if (this.points.length > KEPT) this.points.shift();
  }

  column(read) {
    return this.points.map(read);
  }

  /** The mean of the last `seconds` seconds. */
  mean(read, seconds = 10) {
    const recent = this.points.filter((point) => point.time > (this.last?.time ?? 0) - seconds);
    return recent.length ? recent.reduce((sum, point) => sum + read(point), 0) / recent.length : null;
  }

  sum(read, seconds = 60) {
    return this.points.filter((point) => point.time > (this.last?.time ?? 0) - seconds).reduce((sum, point) => sum + read(point), 0);
  }
}
