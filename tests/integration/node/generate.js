// Calls a running control plane: node generate.js TARGET unary|stream REQUEST_JSON
// Prints one JSON object: {text, token_ids, finish_reason, completion_tokens}.
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const [target, mode, requestJson] = process.argv.slice(2);
const root = path.resolve(__dirname, "../../..");
const definition = protoLoader.loadSync("protos/hetero/inference/v1/inference.proto", {
  includeDirs: [root],
  keepCase: true,
  longs: String,
  enums: String,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).hetero.inference.v1;
const client = new InferenceService(target, grpc.credentials.createInsecure());
const request = JSON.parse(requestJson);
const deadline = Date.now() + 120_000;

function print(text, tokenIds, end) {
  console.log(
    JSON.stringify({
      text,
      token_ids: tokenIds,
      finish_reason: end.finish_reason,
      completion_tokens: end.usage.completion_tokens,
    }),
  );
  client.close();
}

function fail(error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exit(1);
}

if (mode === "unary") {
  client.Generate(request, { deadline }, (error, reply) => {
    if (error) return fail(error);
    print(reply.text, reply.token_ids, reply);
  });
} else {
  let text = "";
  const tokenIds = [];
  let finished;
  const call = client.GenerateStream(request, { deadline });
  call.on("data", (message) => {
    if (message.delta) {
      text += message.delta.text;
      tokenIds.push(...message.delta.token_ids);
    } else if (message.finished) {
      finished = message.finished;
    }
  });
  call.on("error", fail);
  call.on("end", () => print(text, tokenIds, finished));
}
