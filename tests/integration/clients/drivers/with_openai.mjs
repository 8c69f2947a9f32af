// OpenAI's own npm package, without retries.
import OpenAI, { APIConnectionTimeoutError, APIError } from "openai";
import { answerLines, host, httpPort, piecesTaken } from "./line_protocol.mjs";

const server = `http://${host}:${httpPort}`;
const PATIENCE_S = 120;
const PATHS = { tokenize: "/tokenize", detokenize: "/detokenize", chat_template: "/tokenize" };
const NOT_OF_THE_BODY = [
  "op", "token", "timeout_s", "leave_after", "include_usage", "extra", "include_stop",
];

// Parameters that the package does not know are sent as they are: its own way for them.
function bodyOf(request) {
  const body = { ...request };
  for (const name of NOT_OF_THE_BODY) delete body[name];
  if ("include_stop" in request) body.include_stop_str_in_output = request.include_stop;
  if (request.op === "chat" && "logprobs" in body) {
    body.top_logprobs = body.logprobs;
    body.logprobs = true;
  }
  if ("prompt_logprobs" in body) {
    body.logprobs = body.prompt_logprobs;
    body.echo = true;
    delete body.prompt_logprobs;
  }
  if (request.op === "respond") {
    body.input = body.prompt ?? body.messages;
    body.max_output_tokens = body.max_tokens;
    if ("logprobs" in body) {
      body.top_logprobs = body.logprobs;
      body.include = ["message.output_text.logprobs"];
      delete body.logprobs;
    }
    delete body.prompt;
    delete body.messages;
    delete body.max_tokens;
    delete body.stream;
  } else if (body.stream && request.include_usage !== false) {
    body.stream_options = { include_usage: true };
  }
  return { ...body, ...request.extra };
}

const usageOf = (usage) =>
  usage && { prompt_tokens: usage.prompt_tokens, completion_tokens: usage.completion_tokens };

// Both shapes: columns of a completion, entries of a chat.
function logprobsOf(logprobs) {
  if (!logprobs) return {};
  if ("content" in logprobs) {
    const entries = logprobs.content ?? [];
    return {
      logprobs: entries.map((entry) => entry.logprob),
      top_logprobs: entries.map((entry) => entry.top_logprobs.map((top) => top.logprob)),
    };
  }
  return {
    logprobs: logprobs.token_logprobs,
    top_logprobs: logprobs.top_logprobs.map((top) =>
      Object.values(top ?? {}).sort((a, b) => b - a),
    ),
  };
}

// Tells prompt and answer apart where only the prompt's log-probabilities were wanted.
function withoutEcho(request, answer) {
  if (!("prompt_logprobs" in request)) return answer;
  const count = answer.usage.prompt_tokens;
  for (const choice of answer.choices) {
    choice.text = choice.text.slice(request.prompt.length);
    choice.prompt_logprobs = choice.logprobs.slice(0, count);
    choice.logprobs = choice.logprobs.slice(count);
    choice.top_logprobs = choice.top_logprobs.slice(count);
    delete choice.pieces;
  }
  return answer;
}

function wholeAnswer(request, whole) {
  const choices = whole.choices.map((choice) => ({
    text: request.op === "chat" ? choice.message.content : choice.text,
    finish_reason: choice.finish_reason,
    ...logprobsOf(choice.logprobs),
  }));
  return withoutEcho(request, { choices, usage: usageOf(whole.usage) });
}

async function streamAnswer(request, stream) {
  const choices = [];
  let usage = null;
  let numPieces = 0;
  for await (const chunk of stream) {
    usage = usageOf(chunk.usage) ?? usage;
    for (const choice of chunk.choices) {
      const known = (choices[choice.index] ??= { text: "", finish_reason: null, pieces: [] });
      const text = choice.delta ? choice.delta.content : choice.text;
      if (text) {
        known.text += text;
        known.pieces.push(text);
        numPieces += 1;
      }
      known.finish_reason = choice.finish_reason ?? known.finish_reason;
      for (const [name, values] of Object.entries(logprobsOf(choice.logprobs))) {
        (known[name] ??= []).push(...values);
      }
    }
    if (piecesTaken(numPieces, request)) return { left: true }; // leaving the loop aborts
  }
  return withoutEcho(request, { choices, usage });
}

function responseAnswer(response, text) {
  const messages = response.output.filter((item) => item.type === "message");
  const parts = messages.flatMap((item) => item.content);
  const finishReason = response.status === "completed" ? "stop" : "length";
  const logprobs = logprobsOf({ content: parts.flatMap((part) => part.logprobs ?? []) });
  return {
    choices: [{ text, finish_reason: finishReason, ...logprobs }],
    usage: {
      prompt_tokens: response.usage.input_tokens,
      completion_tokens: response.usage.output_tokens,
    },
  };
}

async function respond(client, request) {
  const body = bodyOf(request);
  if (!request.stream) {
    const response = await client.responses.create(body);
    return responseAnswer(response, response.output_text);
  }
  const pieces = [];
  const events = [];
  const stream = client.responses.stream(body);
  for await (const event of stream) {
    if (events.at(-1) !== event.type) events.push(event.type);
    if (event.type === "response.output_text.delta") pieces.push(event.delta);
  }
  const answer = responseAnswer(await stream.finalResponse(), pieces.join(""));
  Object.assign(answer.choices[0], { pieces, events });
  return answer;
}

async function ask(client, request) {
  switch (request.op) {
    case "models": {
      const models = [];
      for await (const model of client.models.list()) models.push(model.id);
      return { models };
    }
    case "model":
      return { models: [(await client.models.retrieve(request.model)).id] };
    case "ready": // no part of OpenAI's API: by the package's way to other paths
      return { ready: (await client.get(`${server}/readyz`)).status === "ok" };
    case "respond":
      return respond(client, request);
    case "complete":
    case "chat": {
      const body = bodyOf(request);
      const answer =
        request.op === "chat"
          ? await client.chat.completions.create(body)
          : await client.completions.create(body);
      return request.stream ? streamAnswer(request, answer) : wholeAnswer(request, answer);
    }
    default: {
      const whole = await client.post(server + PATHS[request.op], { body: bodyOf(request) });
      return request.op === "detokenize" ? { text: whole.prompt } : { token_ids: whole.tokens };
    }
  }
}

await answerLines(async (request) => {
  const client = new OpenAI({
    baseURL: `${server}/v1`,
    apiKey: request.token || "none",
    maxRetries: 0,
    timeout: 1000 * (request.timeout_s ?? PATIENCE_S),
  });
  try {
    return await ask(client, request);
  } catch (error) {
    if (error instanceof APIConnectionTimeoutError) return { error: { timed_out: true } };
    if (!(error instanceof APIError) || error.status === undefined) throw error;
    const { status, type, code, param } = error;
    return { error: { status, type, code, field: param } };
  }
});
