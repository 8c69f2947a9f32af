// @grpc/grpc-js, with the services made from the repository's .proto files.
import path from "node:path";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { service as healthService } from "grpc-health-check";
import protobuf from "protobufjs";
import { answerLines, grpcPort, host, piecesTaken } from "./line_protocol.mjs";

const PATIENCE_S = 120;
const SAMPLING = [
  "max_tokens", "temperature", "top_p", "seed", "ignore_eos", "n", "beam_width", "length_penalty",
  "early_stopping", "top_k", "min_p", "repetition_penalty", "presence_penalty",
  "frequency_penalty", "logit_bias", "stop_token_ids", "include_stop",
];
const OF_THE_REQUEST = ["model", "priority", "cache_salt"];

const root = path.resolve(import.meta.dirname, "../../../..");
const definition = protoLoader.loadSync("protos/hetero/inference/v1/inference.proto", {
  includeDirs: [root],
  keepCase: true,
  longs: String,
  enums: String,
  oneofs: true,
});
const api = grpc.loadPackageDefinition(definition).hetero.inference.v1;
const address = `${host}:${grpcPort}`;
const credentials = grpc.credentials.createInsecure();
const clients = {
  inference: new api.InferenceService(address, credentials),
  models: new api.ModelService(address, credentials),
  text: new api.TokenizerService(address, credentials),
  health: new (grpc.makeClientConstructor(healthService, "Health"))(address, credentials),
};

// What google/rpc/status.proto and error_details.proto say of the fields that are read here.
const { root: details } = protobuf.parse(`
  syntax = "proto3";
  package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; }
  message BadRequest {
    message FieldViolation { string field = 1; string description = 2; }
    repeated FieldViolation field_violations = 1;
  }
`, { keepCase: true });

function refusalOf(error) {
  if (error.code === grpc.status.DEADLINE_EXCEEDED) return { error: { timed_out: true } };
  let code = null;
  let field = null;
  for (const bytes of error.metadata?.get("grpc-status-details-bin") ?? []) {
    for (const { type_url: url, value } of details.lookupType("Status").decode(bytes).details) {
      const name = url.split("/").at(-1);
      if (name === "google.rpc.ErrorInfo") {
        code = details.lookupType(name).decode(value).reason;
      } else if (name === "google.rpc.BadRequest") {
        field = details.lookupType(name).decode(value).field_violations[0].field;
      }
    }
  }
  return { error: { status: grpc.status[error.code], code, field } };
}

function pick(request, names) {
  return Object.fromEntries(
    names.filter((name) => name in request).map((name) => [name, request[name]]),
  );
}

function conversationOf(request) {
  const found = { messages: request.messages };
  if (request.tools) {
    found.tools = request.tools.map(({ function: tool }) => ({
      name: tool.name,
      description: tool.description,
      parameters_json: JSON.stringify(tool.parameters ?? {}),
    }));
  }
  if (request.chat_template_kwargs) {
    found.chat_template_kwargs_json = JSON.stringify(request.chat_template_kwargs);
  }
  return found;
}

function generationOf(request) {
  const sampling = pick(request, SAMPLING);
  if ("stop" in request) sampling.stop = [request.stop].flat();
  if ("logprobs" in request) sampling.num_logprobs = request.logprobs;
  if ("prompt_logprobs" in request) {
    sampling.num_logprobs = sampling.num_prompt_logprobs = request.prompt_logprobs;
  }
  const message = { ...pick(request, OF_THE_REQUEST), sampling };
  if (request.op === "chat") return { ...message, ...conversationOf(request) };
  if (typeof request.prompt === "string") return { ...message, text: request.prompt };
  return { ...message, token_ids: { ids: request.prompt } };
}

function startChoice(request) {
  const choice = { text: "", token_ids: [] };
  const wantsLogprobs = "logprobs" in request || "prompt_logprobs" in request;
  return wantsLogprobs ? { ...choice, logprobs: [], top_logprobs: [] } : choice;
}

function extend(choice, part) {
  choice.text += part.text ?? "";
  choice.token_ids.push(...(part.token_ids ?? []));
  for (const entry of part.logprobs ?? []) {
    choice.logprobs.push(entry.logprob ?? 0);
    choice.top_logprobs.push(entry.top_logprobs ?? []);
  }
}

function end(choice, part) {
  choice.finish_reason = part.finish_reason.replace("FINISH_REASON_", "").toLowerCase();
  choice.matched_stop = part.matched_stop?.text ?? part.matched_stop?.token_id ?? null;
}

// The first token has none.
const promptLogprobsOf = (message) => [
  null,
  ...(message.logprobs ?? []).map((entry) => entry.logprob ?? 0),
];

const usageOf = ({ prompt_tokens = 0, completion_tokens = 0 }) => ({
  prompt_tokens,
  completion_tokens,
});

function wholeAnswer(request, reply) {
  const choices = (reply.samples?.length ? reply.samples : [reply]).map((sample) => {
    const choice = startChoice(request);
    extend(choice, sample);
    end(choice, sample);
    return choice;
  });
  if ("prompt_logprobs" in request) {
    choices[0].prompt_logprobs = promptLogprobsOf(reply.prompt_logprobs);
  }
  return { choices, usage: usageOf(reply.usage) };
}

async function streamAnswer(request, call) {
  const choices = Array.from({ length: request.n ?? 1 }, () => startChoice(request));
  let usage = null;
  let numPieces = 0;
  for await (const message of call) {
    if (message.delta) {
      const choice = choices[message.delta.index ?? 0];
      extend(choice, message.delta);
      if (message.delta.text) {
        (choice.pieces ??= []).push(message.delta.text);
        numPieces += 1;
      }
    } else if (message.sample_finished) {
      end(choices[message.sample_finished.index ?? 0], message.sample_finished);
    } else if (message.prompt_logprobs) {
      choices[0].prompt_logprobs = promptLogprobsOf(message.prompt_logprobs);
    } else if (message.finished) {
      end(choices[0], message.finished);
      usage = usageOf(message.finished.usage);
    }
    if (piecesTaken(numPieces, request)) {
      call.on("error", () => {}); // it ends as cancelled
      call.cancel();
      return { left: true };
    }
  }
  return { choices, usage };
}

async function ask(request) {
  const metadata = new grpc.Metadata();
  if (request.token) metadata.set("authorization", `Bearer ${request.token}`);
  const options = { deadline: Date.now() + 1000 * (request.timeout_s ?? PATIENCE_S) };
  const call = (client, method, message) =>
    new Promise((resolve, reject) => {
      client[method](message, metadata, options, (error, reply) =>
        error ? reject(error) : resolve(reply),
      );
    });
  const model = { model: request.model };
  switch (request.op) {
    case "ready": {
      const service = "hetero.inference.v1.InferenceService";
      return { ready: (await call(clients.health, "Check", { service })).status === "SERVING" };
    }
    case "models": {
      const { models } = await call(clients.models, "ListModels", {});
      return { models: models.map((info) => info.model) };
    }
    case "model":
      return { models: [(await call(clients.models, "GetModelInfo", model)).model] };
    case "tokenize": {
      const message = { ...model, text: request.prompt };
      return { token_ids: (await call(clients.text, "Tokenize", message)).token_ids ?? [] };
    }
    case "detokenize": {
      const flags = pick(request, ["skip_special_tokens"]);
      const message = { ...model, ...flags, token_ids: { ids: request.tokens } };
      return { text: (await call(clients.text, "Detokenize", message)).text ?? "" };
    }
    case "chat_template": {
      const message = { ...model, ...conversationOf(request) };
      return { token_ids: (await call(clients.text, "ApplyChatTemplate", message)).token_ids };
    }
    case "complete":
      return generate("Generate", "generate", request, { call, metadata, options });
    case "chat":
      return generate("Chat", "chat", request, { call, metadata, options });
    default:
      throw new Error(`no call for ${request.op}`);
  }
}

async function generate(method, original, request, { call, metadata, options }) {
  const message = generationOf(request);
  if ("received_token_ids" in request) {
    const resumed = { [original]: message, received_token_ids: request.received_token_ids };
    return streamAnswer(request, clients.inference.Resume(resumed, metadata, options));
  }
  if (request.stream) {
    return streamAnswer(request, clients.inference[`${method}Stream`](message, metadata, options));
  }
  return wholeAnswer(request, await call(clients.inference, method, message));
}

await answerLines(async (request) => {
  try {
    return await ask(request);
  } catch (error) {
    if (error.code === undefined || !(error.code in grpc.status)) throw error;
    return refusalOf(error);
  }
});
process.exit(0);
