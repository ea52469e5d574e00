-- Chat requests of 1.5 KB, in 1,000 conversations by turns: a shared system prompt, and a question that differs each time.
wrk.method = "POST"
local system = string.rep("You are a helpful assistant. ", 48)
local n = 0
request = function()
  n = n + 1
  local headers = {["Content-Type"] = "application/json", ["X-Session-Id"] = "talk-" .. (n % 1000)}
  local user = "question number " .. n .. " about the weather in the mountains and the price of tea, please answer in one sentence"
  return wrk.format(nil, nil, headers, '{"model":"m","messages":[{"role":"system","content":"' .. system .. '"},{"role":"user","content":"' .. user .. '"}],"stream":false}')
end
