// The line protocol of a driver written in JavaScript: a request a line in, an answer a line out.
// Started as `node DRIVER HOST GRPC_PORT HTTP_PORT`. README.md has the fields of both.
import { createInterface } from "node:readline";

export const [host, grpcPort, httpPort] = process.argv.slice(2);

export async function answerLines(answer) {
  for await (const line of createInterface({ input: process.stdin })) {
    let found;
    try {
      found = await answer(JSON.parse(line));
    } catch (error) {
      // Whatever a client library throws at one case, the cases behind it are asked all the same.
      found = { fault: error.stack ?? String(error) };
    }
    process.stdout.write(JSON.stringify(found) + "\n");
  }
}

// Whether a client that leaves in mid-stream has had as many pieces of text as it wants.
export function piecesTaken(taken, request) {
  return request.leave_after !== undefined && taken >= request.leave_after;
}
