# kvgate as a container: two stages, not root, nothing to write to but /data and /tmp (docs/deployment.md).
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY kvgate kvgate
RUN python -m venv /opt/kvgate \
    && /opt/kvgate/bin/pip install --no-cache-dir -c constraints.txt '.[tokenizer]' \
    && /opt/kvgate/bin/pip uninstall --yes pip

FROM python:3.11-slim-bookworm
COPY --from=build /opt/kvgate /opt/kvgate
RUN useradd --system --uid 10001 --home-dir /data --create-home kvgate
USER 10001
WORKDIR /data
VOLUME /data
ENV PATH=/opt/kvgate/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    KVGATE_LISTEN=0.0.0.0:8600 \
    KVGATE_ADMIN_LISTEN=0.0.0.0:8601 \
    KVGATE_TENANTS=/etc/kvgate/tenants.toml \
    KVGATE_STORE__DATA_DIR=/data/.kvgate
EXPOSE 8600 8601
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import os, urllib.request as ask; ask.urlopen('http://127.0.0.1:' + os.environ['KVGATE_ADMIN_LISTEN'].rpartition(':')[2] + '/healthz', timeout=2)"]
ENTRYPOINT ["kvgate"]
CMD ["serve"]
