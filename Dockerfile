# The gateway in a small image. The configuration is not in it: mount a folder with config.yaml at /etc/warmroute.
#
#     docker build -t warmroute .
#     docker run -p 8080:8080 -v ./etc:/etc/warmroute:ro warmroute
#
# In a container a listener on 127.0.0.1 is reached by nobody outside: the file needs `listen: {host: 0.0.0.0, port: 8080}`.
# `admin` may stay on 127.0.0.1 for the HEALTHCHECK below, which runs inside; probes from outside (Kubernetes) need 0.0.0.0
# there too, and then a network policy and `admin.token`: without one the inspector answers on loopback only, and health
# and metrics ask for none in any case. Do not publish 8081.

FROM python:3.11-slim AS build
RUN python -m venv /opt/warmroute
WORKDIR /src
COPY requirements.lock ./
RUN /opt/warmroute/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY policies policies
COPY backends backends
COPY simulator simulator
RUN /opt/warmroute/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation .

FROM python:3.11-slim
RUN groupadd --gid 10001 warmroute \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin warmroute
COPY --from=build /opt/warmroute /opt/warmroute
# HF_HOME: tokenizers that are named by a Hugging Face id are kept there; mount a volume to keep them longer.
ENV PATH=/opt/warmroute/bin:$PATH PYTHONUNBUFFERED=1 HF_HOME=/tmp/huggingface
USER 10001:10001
EXPOSE 8080 8081
HEALTHCHECK --interval=10s --timeout=3s --start-period=15s \
  CMD ["python", "-c", "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8081/healthz', timeout=2)"]
ENTRYPOINT ["warmroute"]
CMD ["serve", "--config", "/etc/warmroute/config.yaml"]
