# specheads on a CPU, with the versions it was tested with:
#   docker build -t specheads .
#   docker run -it -v specheads:/root/.cache specheads chat checkpoint=smollm2
FROM python:3.11-slim
COPY . /tmp/specheads
RUN pip install --no-cache-dir --constraint /tmp/specheads/constraints.txt "/tmp/specheads[train,gguf,plots]" \
    && rm -rf /tmp/specheads
WORKDIR /work
ENTRYPOINT ["specheads"]
CMD ["--help"]
