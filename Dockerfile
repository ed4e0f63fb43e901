# kvgate as a container: two stages, not root, nothing to write to but /data.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY kvgate kvgate
RUN python -m venv /opt/kvgate \
    && /opt/kvgate/bin/pip install --no-cache-dir -c constraints.txt '.[tokenizer]'

FROM python:3.11-slim-bookworm
COPY --from=build /opt/kvgate /opt/kvgate
RUN useradd --system --uid 10001 --home-dir /data --create-home kvgate
USER 10001
WORKDIR /data
VOLUME /data
ENV PATH=/opt/kvgate/bin:$PATH \
    KVGATE_LISTEN=0.0.0.0:8600 \
    KVGATE_ADMIN_LISTEN=0.0.0.0:8601 \
    KVGATE_STORE__DATA_DIR=/data/.kvgate
EXPOSE 8600 8601
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8601/healthz', timeout=2)"]
ENTRYPOINT ["kvgate"]
CMD ["serve", "--tenants", "/data/tenants.toml"]
