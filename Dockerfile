# Built in one image, run in another that has no compiler and no root. Settings: /etc/locum; data: /var/lib/locum.
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md ./
COPY gateway gateway
RUN python -m venv /opt/locum && /opt/locum/bin/pip install --no-cache-dir .

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 9529 --home-dir /var/lib/locum --create-home locum
COPY --from=build /opt/locum /opt/locum
COPY conf /etc/locum
USER locum
VOLUME /var/lib/locum
# Signals reach the gateway itself, which then ends in order: what it acknowledged is on disk.
ENTRYPOINT ["/opt/locum/bin/locum"]
CMD ["run", "--conf", "/etc/locum", "--data", "/var/lib/locum"]
